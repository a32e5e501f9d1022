"""Texts with a gap, for models whose tokenizer has marks for what is before it and behind it.

Which marks a tokenizer has says how such a text is written; which model it is says nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from mdi.text.tokenizer import FileTokenizer

_ANCHOR = "\u263a"  # a character that no word has
_WORD = "\u2581"  # what tokenizers of sentencepiece put before the first word of a text


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


def with_gap(tokenizer: FileTokenizer, before: str | list[int], behind: str, first_id: int | None) -> Gap | None:
    """None if the tokenizer has no such marks.

    Args:
        before: a text or ids, before the gap.
        first_id: see TextCodec.first_id.
    """
    for marks in MARKS:
        found = [_id_of(tokenizer, token) for token in marks[:3]]
        ids = [i for i in found if i is not None]
        if len(ids) < len(found):
            continue
        ends = [i for token in marks.ends if (i := _id_of(tokenizer, token)) is not None]
        own = tokenizer.ids_of(before, adds_special=False) if isinstance(before, str) else before
        first = [] if first_id is None else [first_id]
        return Gap([*first, ids[0], *own, ids[1], *_ids_within(tokenizer, behind), ids[2]], [*ids, *ends])
    return None


def _ids_within(tokenizer: FileTokenizer, text: str) -> list[int]:
    """Of a text that begins within a line: without a word mark before it that is not in the text."""
    ids = tokenizer.ids_of(text, adds_special=False)
    anchor = tokenizer.ids_of(_ANCHOR, adds_special=False)
    if not anchor or not _piece(tokenizer, anchor[0]).startswith(_WORD):
        return ids
    both = tokenizer.ids_of(_ANCHOR + text, adds_special=False)
    return both[len(anchor) :] if both[: len(anchor)] == anchor else ids


def _id_of(tokenizer: FileTokenizer, token: str) -> int | None:
    try:
        found = tokenizer.token_to_id(token)
    except ValueError:
        return None
    return found if _piece(tokenizer, found) == token else None  # sentencepiece has an id for what it does not know


def _piece(tokenizer: FileTokenizer, i: int) -> str:
    of = tokenizer.processor.id_to_token if tokenizer.backend == "huggingface" else tokenizer.processor.id_to_piece
    return str(of(i))
