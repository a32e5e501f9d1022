"""Texts with a gap, for models whose tokenizer has marks for what is before it and behind it.

Which marks a tokenizer has says how such a text is written; which model it is says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mdi.text.quoted import Quotes
from mdi.text.tokenizer import FileTokenizer


class Marks(NamedTuple):
    """Special tokens before what precedes the gap, before what follows it, and behind both: the model continues there.

    Attributes:
        ends: tokens that end what fills the gap, besides the marks and the end of a text.
    """

    before: str
    behind: str
    gap: str
    ends: tuple[str, ...] = ()


MARKS = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>")),
    Marks(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>", "<file_separator>", "<repo_name>")
    ),
    Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>",)),
    Marks("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",)),
    Marks("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)


class Gap(NamedTuple):
    """Attributes:
    ids: of the text with its gap, which the model continues with what fills it.
    ends: ids that end that.
    """

    ids: list[int]
    ends: list[int]


def with_gap(
    tokenizer: FileTokenizer, before: str | list[int], behind: str, first_id: int | None, special: Iterable[str] = ()
) -> Gap | None:
    """None if the tokenizer has no such marks.

    Args:
        before: a text or ids, before the gap.
        first_id: see TextCodec.first_id.
        special: names of special tokens, which are words in the texts, as those of the marks are.
    """
    for marks in MARKS:
        found = [_id_of(tokenizer, token) for token in marks[:3]]
        ids = [i for i in found if i is not None]
        if len(ids) < len(found):
            continue
        ends = [i for token in marks.ends if (i := _id_of(tokenizer, token)) is not None]
        quotes = Quotes({*special, *marks[:3], *marks.ends})
        own = _ids(tokenizer, quotes.pieces(before), is_within=False) if isinstance(before, str) else before
        own_behind = _ids(tokenizer, quotes.pieces(behind), is_within=True)
        first = [] if first_id is None else [first_id]
        return Gap([*first, ids[0], *own, ids[1], *own_behind, ids[2]], [*ids, *ends])
    return None


def _ids(tokenizer: FileTokenizer, pieces: list[str], is_within: bool) -> list[int]:
    """Of a text in pieces; `is_within`: it begins within a line."""
    first, *others = pieces
    ids = tokenizer.ids_within(first) if is_within else tokenizer.ids_of(first, adds_special=False)
    return [*ids, *(i for piece in others for i in tokenizer.ids_within(piece))]


def _id_of(tokenizer: FileTokenizer, token: str) -> int | None:
    try:
        found = tokenizer.token_to_id(token)
    except ValueError:
        return None
    return found if tokenizer.piece(found) == token else None  # sentencepiece has an id for what it does not know
