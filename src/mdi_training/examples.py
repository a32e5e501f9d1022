"""Examples to fine-tune with: JSON lines of texts, prompts with completions, or texts with labels, as token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mdi.errors import Code, UsageError
from mdi.spec.settings_file import parse_json
from mdi.text.texts import TextCodec
from mdi_training.storage import missing


class Example(NamedTuple):
    """What goes round the ring, and what is to follow from it.

    Attributes:
        ids: of the text, without the last token where that is only to be predicted.
        read_from: the first position whose rows are wanted; all behind it are.
        targets: for each of these rows the next token, or the number of the label.
    """

    ids: tuple[int, ...]
    read_from: int
    targets: tuple[int, ...]

    @property
    def n_rows(self) -> int:
        return len(self.ids) - self.read_from


def read_rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, and where each of them stands. Raises UsageError."""
    if not path.is_file():
        raise UsageError(missing(path, "the file of examples"), code=Code.MISSING)
    found: list[tuple[str, dict[str, Any]]] = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            for n, line in enumerate(file, start=1):
                if line.strip():
                    row, where = parse_json(line), f"{path}, line {n}"
                    if not isinstance(row, dict):
                        raise UsageError(f"{where} is no JSON object", code=Code.UNREADABLE)
                    found.append((where, row))
    except (OSError, ValueError) as e:
        raise UsageError(f"{path} cannot be read as JSON lines: {e}", code=Code.UNREADABLE) from e
    if not found:
        raise UsageError(f"{path} has no examples", code=Code.EMPTY)
    return found


def _text(row: dict[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value:
        raise UsageError(
            f"{where}: {field!r} is no text; the line has {', '.join(map(str, row))[:200]}", code=Code.COLUMN
        )
    return value


def lm_examples(rows: Sequence[tuple[str, dict[str, Any]]], codec: TextCodec, max_length: int) -> list[Example]:
    """Texts to be written. Of a completion all tokens are learned, with one that ends it; a text that is too long is cut.

    Raises:
        UsageError: a line has neither a text nor a prompt with a completion, or these are too long.
    """
    n_bos, end = len(codec.encode("")), sorted(codec.eos_ids)[:1]
    found: list[Example] = []
    for where, row in rows:
        if "completion" in row:
            prompt = codec.encode_prompt(_text(row, "prompt", where))
            ids = [*prompt, *codec.encode(_text(row, "completion", where))[n_bos:], *end]
            if len(ids) - 1 > max_length:
                raise UsageError(f"{where}: {len(ids)} tokens, but a text can have {max_length}", code=Code.LENGTH)
            found.append(Example(tuple(ids[:-1]), len(prompt) - 1, tuple(ids[len(prompt) :])))
            continue
        ids = codec.encode(_text(row, "text", where))
        pieces = [ids[i : i + max_length + 1] for i in range(0, max(1, len(ids) - 1), max_length)]
        found += [Example(tuple(piece[:-1]), 0, tuple(piece[1:])) for piece in pieces if len(piece) > 1]
    if not found:
        raise UsageError("no example has two tokens, so there is nothing to predict", code=Code.SHORT)
    return found


def labels_of(rows: Sequence[tuple[str, dict[str, Any]]]) -> tuple[str, ...]:
    """All labels, in order. Raises UsageError."""
    found = tuple(sorted({_text(row, "label", where) for where, row in rows}))
    if len(found) < 2:
        raise UsageError(f"all examples have the label {found[0]!r}: two at least are needed", code=Code.SHORT)
    return found


def class_examples(
    rows: Sequence[tuple[str, dict[str, Any]]], codec: TextCodec, max_length: int, labels: Sequence[str] | None
) -> list[Example]:
    """Texts whose last row tells their label; without `labels`, that is not known. Raises UsageError."""
    found: list[Example] = []
    for where, row in rows:
        ids = codec.encode(_text(row, "text", where))
        if not 1 <= len(ids) <= max_length:
            raise UsageError(f"{where}: {len(ids)} tokens, but a text can have {max_length}", code=Code.LENGTH)
        target = 0
        if labels is not None:
            label = _text(row, "label", where)
            if label not in labels:
                raise UsageError(
                    f"{where}: the label {label[:60]!r} is none of those that are learned", code=Code.VALUE
                )
            target = labels.index(label)
        found.append(Example(tuple(ids), len(ids) - 1, (target,)))
    return found


def digest_of(examples: Sequence[Example]) -> str:
    """Hash of all examples."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr(tuple(example)).encode())
    return digest.hexdigest()
