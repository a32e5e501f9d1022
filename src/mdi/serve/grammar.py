"""Restricts the next tokens so that a text matches a JSON schema, by llguidance.

The engine's thread asks the grammars of all texts of a frame, so all texts wait for each of them. Hardly any schema takes a
millisecond for a token, but one of 200 characters may take 20 ms for each. So the time of grammars is counted.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mdi.errors import EngineError, UsageError
from mdi.text.limited import llguidance_form
from mdi.text.tokenizer import tokenizer_json

USUAL_S = 0.002  # of a question: this much is not counted
REQUEST_S = 0.2  # for all texts of a request together
ALL_S, ALL_SHARE = 0.5, 0.1  # for all requests together: at once, and of the time that passes
# Of llguidance, for one token: a fourth of its own. Schemas of a hundred kilobytes stay far below.
STEP_FUEL, LEXER_STATES = 50_000, 50_000

Answer = TypeVar("Answer")


class AllTime:
    """Time that the grammars of all requests may still take beyond what is usual.

    Args:
        now: seconds that pass.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._left_s, self._at_s = ALL_S, now()

    def left_s(self) -> float:
        now = self._now()
        self._left_s = min(ALL_S, self._left_s + ALL_SHARE * (now - self._at_s))
        self._at_s = now
        return self._left_s

    def take(self, taken_s: float) -> None:
        self._left_s -= taken_s


class RequestGrammar:
    """What the texts of a request have in common: their grammar, and the time that all of them and their copies may still take.

    Args:
        clock: computing time of this thread, so that a busy machine ends no text.

    Attributes:
        compiled: llguidance's matcher of a text that is empty; None before it is compiled, under `compiling`.
    """

    def __init__(self, of_all: AllTime, clock: Callable[[], float] = time.thread_time) -> None:
        self._of_all = of_all
        self._clock = clock
        self._left_s = REQUEST_S
        self._is_over = False
        self.compiling = threading.Lock()
        self.compiled: Any = None

    def counted(self, question: Callable[..., Answer], *args: Any) -> Answer:
        begin = self._clock()
        try:
            return question(*args)
        finally:
            beyond_s = self._clock() - begin - USUAL_S
            if beyond_s > 0:
                self._left_s -= beyond_s
                self._of_all.take(beyond_s)
                self._is_over = self._left_s < 0 or self._of_all.left_s() < 0

    @property
    def is_over(self) -> bool:
        """Only a question that takes long makes it so: what others take ends no text whose grammar is quick."""
        return self._is_over


class GrammarSource:
    """Makes constraints for the texts of one model.

    Args:
        directory: of its tokenizer.
        eos_ids: tokens that end a text.
        n_vocabulary: ids that the model knows; there may be more than the tokenizer has.
        clock, now: see RequestGrammar and AllTime.

    Raises:
        UsageError: the tokenizer has a form that llguidance does not read, or llguidance is not installed.
    """

    def __init__(
        self, directory: Path, eos_ids: Iterable[int], n_vocabulary: int,
        clock: Callable[[], float] = time.thread_time, now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        path = tokenizer_json(directory)
        if path is None:
            raise UsageError("response_format needs a model with a tokenizer.json")
        try:
            import llguidance
        except ModuleNotFoundError:
            raise UsageError("response_format needs the library llguidance: pip install llguidance") from None
        self._n_vocabulary = n_vocabulary
        self._eos_ids = sorted(eos_ids)
        eos = self._eos_ids[0] if self._eos_ids else None
        self._llguidance = llguidance
        self._clock, self._of_all = clock, AllTime(now)
        self._lock = threading.Lock()
        self._requests: weakref.WeakValueDictionary[int, RequestGrammar] = weakref.WeakValueDictionary()
        self._tokenizer = llguidance.LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=n_vocabulary, eos_token=eos)

    def constraint(self, wanted: Mapping[str, Any], request: int) -> Grammar:
        """Of one text of the request with this number, whose texts have the same schema: it is compiled once.

        Raises UsageError if the schema cannot be used. Some take minutes, or end this process: those must not come here
        (`mdi.text.limited`).
        """
        with self._lock:
            of_request = self._requests.setdefault(request, RequestGrammar(self._of_all, self._clock))
        with of_request.compiling:
            if of_request.compiled is None:
                of_request.compiled = self._compile(wanted, of_request)
            return Grammar(of_request.compiled.deep_copy(), self._eos_ids, self._n_vocabulary, of_request)

    def _compile(self, wanted: Mapping[str, Any], of_request: RequestGrammar) -> Any:
        """llguidance's matcher, which knows already what a text may begin with: all texts of the request need that."""
        matcher = self._llguidance.LLMatcher
        try:
            is_schema = "schema" in wanted
            form = llguidance_form(matcher, json.dumps(wanted["schema"]) if is_schema else wanted["lark"], is_schema)
        except ValueError as e:
            raise UsageError(f"the JSON schema cannot be used: {' '.join(str(e).split())[:200]}") from None
        limits = self._llguidance.LLParserLimits(step_lexer_fuel=STEP_FUEL, max_lexer_states=LEXER_STATES)
        made = matcher(self._tokenizer, form, log_level=0, limits=limits)
        if made.is_error():
            raise UsageError(f"the JSON schema cannot be used: {_error_of(made)}")
        try:
            Grammar(made, self._eos_ids, self._n_vocabulary, of_request).first()
        except EngineError as e:
            raise UsageError("the JSON schema cannot be used: no text matches it") from e
        return made


class Grammar:
    """A `mdi.engine.sequence.Constraint`. When its time is over, `allowed` raises, so that the engine ends the text."""

    def __init__(self, matcher: Any, eos_ids: list[int], n_vocabulary: int, of_request: RequestGrammar) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._n_vocabulary = n_vocabulary
        self._of_request = of_request

    def allowed(self) -> np.ndarray:
        if self._of_request.is_over:
            raise EngineError("its grammar takes too long")
        return self._of_request.counted(self.first)

    def first(self) -> np.ndarray:
        """The same, not counted: asked before the text begins, when nobody waits for it."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.zeros(self._n_vocabulary, dtype=bool)
        known = np.unpackbits(bits, bitorder="little")[: self._n_vocabulary].astype(bool)
        allowed[: len(known)] = known
        allowed[self._eos_ids] = self._matcher.is_accepting()
        if self._matcher.is_error() or not allowed.any():
            raise EngineError(f"no token may follow: {_error_of(self._matcher) or 'the grammar is at its end'}")
        return allowed

    def take(self, token: int) -> bool:
        if not self._of_request.counted(self._matcher.consume_token, token):
            raise EngineError(f"a token does not match: {_error_of(self._matcher)}")
        return bool(self._matcher.is_stopped())

    def copy(self) -> Grammar:
        copied = self._of_request.counted(self._matcher.deep_copy)
        return Grammar(copied, self._eos_ids, self._n_vocabulary, self._of_request)

    def n_valid(self, tokens: list[int]) -> int:
        return 0 if self._of_request.is_over else int(self._of_request.counted(self._matcher.validate_tokens, tokens))

    def forced(self) -> list[int]:
        return [] if self._of_request.is_over else list(self._of_request.counted(self._matcher.compute_ff_tokens))


def _error_of(matcher: Any) -> str:
    """Without the parser's state and the whole grammar, which follow in lines of their own."""
    return str(matcher.get_error()).partition("\n")[0][:200]
