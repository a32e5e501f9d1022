"""The formats of a model whose matrices differ, as files of other programs mix them, in one text.

A word is the format of every matrix: `int8`. A map has exceptions behind it, by layer, and by layer in some blocks:

    int4;attn.qkv=int4*2048+int8;mlp.proj=int8;mlp.proj@0,4-6=int4

A matrix is in one format, or in ranges of rows with a format each, whole panels: 2048 rows in int4, all others in int8. Layers
have the names of `mdi.model.tensors` without block and ending; an expert has no number there, but a single one may have an
exception with its number. `transformer.wte=tied` says that the embedding is the head's weight. The text says the same in
files, messages and hashes: equal maps have equal texts.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mdi.errors import UsageError

PANEL = 16  # adjacent outputs of a packed weight
MOST_CHARACTERS = 20_000  # of a map
_MOST_PIECES = 64  # of a matrix

_BLOCK = re.compile(r"transformer\.h\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(.+)")
_LAYER = re.compile(r"[a-z][a-z0-9_.]*")
_WORD = re.compile(r"[a-z][a-z0-9_]*")
_BLOCKS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")
_MOST_PLACES = 100_000

TABLE = "transformer.wte"  # the embedding, which is packed only where a map names it
TIED = "tied"  # in place of its format: it is the head's weight, which alone is held
_ENDS = {TABLE: "embedding", "lm_head": "head"}  # the parts of layers that are in no block

Place = tuple[str, int | None]  # a layer, and a block or all
Range = tuple[int, int]


def is_word(form: str) -> bool:
    """Whether it is one format, and no map and no list of pieces."""
    return _WORD.fullmatch(form) is not None


def _are_pieces(form: str) -> bool:
    *before, last = form.split("+")
    counted = [piece.partition("*") for piece in before]
    are_counted = all(
        _WORD.fullmatch(word) and re.fullmatch(r"[1-9]\d{0,9}", n) and int(n) % PANEL == 0 for word, _, n in counted
    )
    return len(before) < _MOST_PIECES and are_counted and _WORD.fullmatch(last) is not None


@dataclass(frozen=True)
class Piece:
    """Rows [first, first + n) of a matrix, in one format."""

    first: int
    n: int
    word: str


@dataclass(frozen=True)
class FormatMap:
    """The format of each matrix of a model, or of a part of it.

    Attributes:
        rest: the format of every matrix that has none of its own.
        of: the formats of others, see `matrix_pieces`.
    """

    rest: str
    of: Mapping[Place, str]

    def at(self, name: str) -> str:
        """The format of a weight by its name in the model, or without what is before the layer in a block."""
        if not self.of:  # nearly always; a plan asks for each matrix of each expert
            return self.rest
        return next((self.of[place] for place in _places(name) if place in self.of), self.rest)

    @property
    def words(self) -> set[str]:
        """All formats that a matrix, or rows of one, may have."""
        forms = {self.rest, *self.of.values()} - {TIED}
        return {piece.word for form in forms for piece in matrix_pieces(form)}

    def of_part(self, part: str) -> str:
        """The map of one part of a model alone ("embedding", "block.7", "head"), which names no block."""
        kind, is_block, number = part.partition(".")
        block = int(number) if is_block else None
        own = {layer: form for (layer, at), form in self.of.items() if at is None}
        own |= {layer: form for (layer, at), form in self.of.items() if at == block}
        own = {
            layer: form
            for layer, form in own.items()
            if _ENDS.get(layer, "block") == kind or (form == TIED and kind == "head")
        }
        kept = {
            layer: form
            for layer, form in own.items()
            if layer == TABLE or form != own.get(_of_experts(layer) or "", self.rest)
        }
        return _text(self.rest, {(layer, None): form for layer, form in kept.items()})

    def __str__(self) -> str:
        return _text(self.rest, self.of)


@functools.lru_cache(maxsize=4096)
def matrix_pieces(form: str, n_out: int | None = None) -> tuple[Piece, ...]:
    """The pieces of a matrix of `n_out` rows; without `n_out`, the last one is counted as empty.

    Raises:
        UsageError: it is no format, or the pieces before the last one have as many rows as there are, or more.
    """
    if not _are_pieces(form):
        raise UsageError(f"{form[:80]!r} is no format of a weight")
    found, first = [], 0
    for text in form.split("+"):
        word, _, count = text.partition("*")
        n = int(count) if count else max(0, (n_out or 0) - first)
        found.append(Piece(first, n, word))
        first += n
    if n_out is not None and len(found) > 1 and (first != n_out or not found[-1].n):
        raise UsageError(f"the format {form} is for more than {found[-1].first} rows, and a weight has {n_out}")
    return tuple(found)


def joined_pieces(pieces: Iterable[tuple[int, str]]) -> str | None:
    """The format of a matrix from rows and format of each piece; None if one before the last is of no whole panels."""
    runs: list[tuple[int, str]] = []
    for n, word in pieces:
        if runs and runs[-1][1] == word:
            runs[-1] = runs[-1][0] + n, word
        else:
            runs.append((n, word))
    if len(runs) > _MOST_PIECES or any(n % PANEL for n, _ in runs[:-1]):
        return None
    return "+".join([*(f"{word}*{n}" for n, word in runs[:-1]), runs[-1][1]])


def runs_of_rows(form: str, n_out: int, rows: Sequence[Range]) -> list[tuple[int, list[Range]]]:
    """Which piece of a matrix some of its rows are in, and their places in it; one run after the other."""
    found: list[tuple[int, list[Range]]] = []
    for start, stop in rows:
        for i, piece in enumerate(matrix_pieces(form, n_out)):
            own = max(start - piece.first, 0), min(stop - piece.first, piece.n)
            if own[0] >= own[1]:
                continue
            if found and found[-1][0] == i:
                found[-1][1].append(own)
            else:
                found.append((i, [own]))
    return found


def rows_form(form: str, n_out: int, rows: Sequence[Range]) -> str:
    """The format of some rows of a matrix, one below the other.

    Raises:
        UsageError: rows of a format are no whole panels, and others follow.
    """
    pieces = matrix_pieces(form, n_out)
    runs = runs_of_rows(form, n_out, rows)
    if not runs:
        return pieces[-1].word
    found = joined_pieces([(sum(b - a for a, b in own), pieces[i].word) for i, own in runs])
    if found is None:
        raise UsageError(f"a share of a weight in {form} would have rows of one format that are no multiple of {PANEL}")
    return found


@functools.lru_cache(maxsize=256)
def format_map(form: str) -> FormatMap:
    """A map from its text, which may come from another node or a file.

    Raises:
        UsageError: it is no map.
    """
    if len(form) > MOST_CHARACTERS:
        raise UsageError(f"formats of {len(form)} characters, more than {MOST_CHARACTERS}")
    rest, *entries = form.split(";")
    of: dict[Place, str] = {}
    for entry in entries:
        where, _, own = entry.partition("=")
        layer, at, blocks = where.partition("@")
        if not (_LAYER.fullmatch(layer) and _are_pieces(own) and bool(at) == bool(_BLOCKS.fullmatch(blocks))):
            raise UsageError(f"formats {form[:200]!r}: {entry[:80]!r} is no layer with its format")
        if TIED in own and (where, own) != (TABLE, TIED):
            raise UsageError(f"formats {form[:200]!r}: {layer} cannot be the head's weight, as an embedding can")
        of |= {(layer, block): own for block in (_numbers(blocks) if at else (None,))}
        if len(of) > _MOST_PLACES:
            raise UsageError(f"formats of more than {_MOST_PLACES} layers")
    if not _WORD.fullmatch(rest) or rest == TIED:
        raise UsageError(f"formats {form[:200]!r}: {rest[:80]!r} is no format")
    found = FormatMap(rest, of)
    if str(found) != form:
        raise UsageError(f"formats {form[:200]!r}: the same is written {str(found)[:200]!r}")
    return found


def with_table(form: str, table: str | None) -> str:
    """The same formats, but for that of the embedding; None: it is not named."""
    found = format_map(form)
    others = {place: own for place, own in found.of.items() if place != (TABLE, None)}
    return _text(found.rest, others if table is None else {**others, (TABLE, None): table})


def shown(form: str) -> str:
    """A format for people, in a few words."""
    words = sorted(format_map(form).words)
    return words[0] if len(words) == 1 else f"a mixture of {', '.join(words)}"


def file_word(form: str) -> str:
    """A format in the name of a file or folder."""
    return form if _WORD.fullmatch(form) else f"mixture-{hashlib.sha256(form.encode()).hexdigest()[:8]}"


def map_of(forms: Mapping[str, str]) -> str:
    """The shortest text for the formats of weights by their names in the model. Raises UsageError: there are none."""
    if not forms:
        raise UsageError("formats of no matrices")
    words = Counter(form for form in forms.values() if _WORD.fullmatch(form))
    rest = min(words, key=lambda word: (-words[word], word)) if words else matrix_pieces(min(forms.values()))[-1].word
    of: dict[Place, str] = {}
    layers: dict[str, dict[int | None, dict[str, str]]] = {}
    for name, form in forms.items():
        own, layer, block = _place(name)
        layers.setdefault(layer, {}).setdefault(block, {})[own] = form
    for layer, blocks in layers.items():
        counts = Counter(form for own in blocks.values() for form in own.values())
        usual = min(counts, key=lambda form: (-counts[form], form != rest, form))
        if usual != rest or layer == TABLE:
            of[layer, None] = usual
        for block, single in blocks.items():
            here = Counter(single.values())
            most = min(here, key=lambda form: (-here[form], form != usual, form))
            if most != usual:
                of[layer, block] = most
            of |= {(one, block): form for one, form in single.items() if form != most}
    return _text(rest, of)


def _numbers(blocks: str) -> list[int]:
    found: list[int] = []
    for run in blocks.split(","):
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _place(name: str) -> tuple[str, str, int | None]:
    """Of a weight: its layer with the expert's number, without it, and its block."""
    match = _BLOCK.fullmatch(name)
    own = (name if match is None else match[2]).removesuffix(".weight")
    return own, _of_experts(own) or own, None if match is None else int(match[1])


def _of_experts(layer: str) -> str | None:
    """Of a layer of one expert, that of all; None for another layer."""
    expert = _EXPERT.fullmatch(layer)
    return None if expert is None else f"{expert[1]}.{expert[2]}"


def _places(name: str) -> list[Place]:
    """Where the format of a weight may stand, the most particular place first."""
    own, layer, block = _place(name)
    return [(own, block), (own, None), (layer, block), (layer, None)]


def _text(rest: str, of: Mapping[Place, str]) -> str:
    runs: dict[tuple[str, str], list[int]] = {}
    entries: list[tuple[str, int, str]] = []
    for (layer, block), form in of.items():
        if block is None:
            entries.append((layer, -1, f"{layer}={form}"))
        else:
            runs.setdefault((layer, form), []).append(block)
    for (layer, form), blocks in runs.items():
        entries.append((layer, min(blocks), f"{layer}@{_spans(sorted(blocks))}={form}"))
    return ";".join([rest, *(text for *_, text in sorted(entries))])


def _spans(blocks: list[int]) -> str:
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found and found[-1][1] == block - 1:
            found[-1] = found[-1][0], block
        else:
            found.append((block, block))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
