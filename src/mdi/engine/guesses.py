"""Sources of guesses: a grammar, a predicted text, repetitions, and a small model. Pure but for the small model.

A guess is never wrong for the text: each is compared with the token that is drawn. It only costs time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from mdi.engine.sampling import Row, sample
from mdi.engine.sequence import Constraint
from mdi.engine.sequence import Sequence as Text
from mdi.kernels.slices import Slice, SliceTable

LONG, SHORT = 8, 3  # tokens that must have occurred before; fewer once the guesses behind such places were right
N_PLACES = 4  # where the last tokens occurred, that are compared
LONGEST = 64  # equal tokens before such a place; more make no difference
LEARN_ROWS = 256  # that the small model computes at once, of a prompt that is new to it


class Source(Protocol):
    """Guesses the next tokens of one text."""

    def propose(self, ids: list[int], n: int) -> list[int]:
        """At most `n` tokens that may follow `ids`, the last of which may be guesses themselves."""

    def learn(self, ids: list[int]) -> bool:
        """Note the tokens of the text that are known by now. Returns whether there may be guesses of the next ones."""

    def close(self) -> None:
        """The text has ended."""


class Index:
    """Where runs of tokens occurred; grows by a token in the same time whatever its length.

    Runs are noted by their hash, for one length when the first one of this length is looked for. Places with the same hash are
    linked, each one to the place before.
    """

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self.ids = list(ids)
        self._noted: dict[int, _Places] = {}  # by the length of the runs

    def extend(self, ids: Iterable[int]) -> None:
        self.ids.extend(ids)

    def find(self, text: list[int], n: int) -> tuple[int, int] | None:
        """The place whose tokens are equal to the last ones of a text the furthest back, of the last N_PLACES where the last
        `n` are; of equal ones, the last place. Not the end, where nothing follows.

        Returns:
            how many tokens are equal, at most LONGEST, and the position behind them; None if the last `n` did not occur.
        """
        ids = self.ids
        noted = self._noted.get(n)
        if noted is None:
            noted = self._noted[n] = _Places({}, [0] * n)
        last, before = noted
        for end in range(len(before), len(ids)):
            run = hash(tuple(ids[end - n : end]))
            before.append(last.get(run, 0))
            last[run] = end
        found = 0, 0
        at = last.get(hash(tuple(text[-n:])), 0)
        for _ in range(N_PLACES):
            if not at:
                break
            found = max(found, (_n_equal(text, ids, at), at))
            at = before[at]
        return found if found[0] >= n else None


class _Places(NamedTuple):
    """Where runs of one length end: by their hash the last place, and for each position the place before with the same hash; 0
    is none.
    """

    last: dict[int, int]
    before: list[int]


def _n_equal(text: list[int], ids: list[int], at: int) -> int:
    """How many of the last tokens of a text are those before position `at` of `ids`, at most LONGEST."""
    n, most = 0, min(len(text), at, LONGEST)
    while n < most and text[-1 - n] == ids[at - 1 - n]:
        n += 1
    return n


class Repetition:
    """Guesses that the text goes on as it did where the most of its last tokens occurred before.

    Args:
        others: further texts in which they may have occurred.
        begun: the text as a whole probably follows the first of these from its beginning: a prediction.
    """

    def __init__(self, others: Sequence[Index] = (), begun: int | None = None) -> None:
        self.own = Index()
        self._looked_into = (self.own, *others)
        self._place: tuple[Index, int] | None = None  # where the text is being repeated, and the position there
        self._begun = begun
        self.n_least = LONG

    def learn(self, ids: list[int]) -> bool:
        n_before = len(self.own.ids)
        new = ids[n_before:]
        for token in new:
            if self._place is None:
                break
            index, at = self._place
            self._place = (index, at + 1) if at < len(index.ids) and index.ids[at] == token else None
            self.own.extend((token,))
        self.own.extend(ids[len(self.own.ids) :])
        if self._begun is not None and len(ids) >= self._begun and len(self._looked_into) > 1:
            n, predicted = len(ids) - self._begun, self._looked_into[1]
            self._begun = None
            if ids[len(ids) - n :] == predicted.ids[:n]:
                self._place = predicted, n
        if self._place is None and new:
            self._place = self._found(ids)
        return self._place is not None

    def propose(self, ids: list[int], n: int) -> list[int]:
        guessed = ids[len(self.own.ids) :]
        place = self._place
        if place is not None:
            index, at = place
            is_own = guessed == self._from(index, at, len(guessed), ids)  # and no other source has guessed these
            place = (index, at + len(guessed)) if is_own else None
        if place is None and guessed:
            place = self._found(ids)
        return [] if place is None else self._from(*place, n, ids)

    def close(self) -> None:
        """Its index stays for other texts."""

    def _found(self, ids: list[int]) -> tuple[Index, int] | None:
        if len(ids) < self.n_least:
            return None
        best, longest = None, 0
        for index in self._looked_into:
            found = index.find(ids, self.n_least)
            if found is not None and found[0] > longest:
                longest, at = found
                best = index, at
        return best

    def _from(self, index: Index, at: int, n: int, ids: list[int]) -> list[int]:
        """`n` tokens from a position on; what repeats itself goes on behind its own end."""
        known = ids if index is self.own else index.ids
        if at + n <= len(known):
            return known[at : at + n]
        if index is not self.own:
            return known[at:]
        found = known[at:]
        period = len(known) - at
        while len(found) < n:
            found.append(found[-period])
        return found


class Forced:
    """Tokens that a constraint leaves no choice about."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._n_known = 0

    def learn(self, ids: list[int]) -> bool:
        self._n_known = len(ids)
        return True

    def propose(self, ids: list[int], n: int) -> list[int]:
        guessed = ids[self._n_known :]
        state = self._constraint
        if guessed:
            state = state.copy()
            if any([state.take(token) for token in guessed]):
                return []
        return state.forced()[:n]

    def close(self) -> None:
        """Nothing is kept."""


class DraftModel:
    """A small model with the same tokens, whole on this node.

    It draws with the random numbers of the real draw at that position. At a temperature above 0 both then choose the same token
    nearly as often as their probabilities overlap (engine.sampling): of nano-llama and its small model at 0.8 they overlap by
    0.63, and 0.55 of the guesses are right.

    Args:
        stage: all its blocks and ends, prepared for texts of `max_length` tokens.
        rows: as the stage has them.
    """

    def __init__(self, stage: Any, rows: Any, max_length: int) -> None:
        self.stage, self.rows, self.max_length = stage, rows, max_length
        self._next_id = 0

    def of(self, text: Text) -> Draft:
        self._next_id += 1
        return Draft(self, self._next_id, text)

    def last_logits(self, seq_id: int, start: int, ids: list[int]) -> Any:
        """Logits (1, vocabulary) behind the last of `ids`, whose first is at position `start`."""
        return self.stage.last_logits(self.rows.ids(ids), SliceTable([Slice(seq_id, start, len(ids), 1)]))


class Draft:
    """Guesses of a small model for one text, with caches of its own."""

    def __init__(self, model: DraftModel, seq_id: int, text: Text) -> None:
        self._model, self._seq_id, self._text = model, seq_id, text
        self._cached: list[int] = []  # ids whose rows the caches hold
        self._n_known = 0

    def learn(self, ids: list[int]) -> bool:
        """Cut the caches where the text went on otherwise."""
        for at in range(self._n_known, min(len(ids), len(self._cached))):
            if self._cached[at] != ids[at]:
                del self._cached[at:]
                break
        self._n_known = min(len(ids), len(self._cached))
        return True

    def propose(self, ids: list[int], n: int) -> list[int]:
        params = self._text.params
        begin = min(len(self._cached), len(ids) - 1)
        if self._cached[self._n_known : begin] != ids[self._n_known : begin]:
            begin = self._n_known
        n = min(n, self._model.max_length - len(ids))
        if n <= 0:
            return []  # the text is longer than the small model's context
        found: list[int] = []
        if len(ids) - begin > LEARN_ROWS:  # a prompt: the texts wait for a part of it at a time
            self._compute(begin, ids[begin : begin + LEARN_ROWS])
            return found
        rows = ids[begin:]
        while len(found) < n:
            logits = self._compute(begin, rows)
            n_drawn = len(ids) + len(found) - self._text.n_prompt
            known = [*ids, *found] if params.changes_logits else ids
            (token,) = sample(logits, [Row(params, n_drawn, known, self._text.n_prompt)])
            found.append(token)
            begin, rows = begin + len(rows), [token]
        return found

    def _compute(self, begin: int, ids: list[int]) -> Any:
        logits = self._model.last_logits(self._seq_id, begin, ids)
        self._cached[begin:] = ids
        return logits

    def close(self) -> None:
        self._model.stage.caches.free(self._seq_id)
