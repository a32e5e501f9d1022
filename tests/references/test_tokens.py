"""Tokenizers that are made of a GGUF file's fields give the ids of tiktoken, which cuts and merges OpenAI's texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mdi.checkpoint.gguftokenizer import write_tokenizer
from references.write_tokens import ENCODINGS, version

TOKENS = Path(__file__).parents[2] / ".venv-references" / "tokens" / "tokens.json"
CUTS = {"cl100k_base": ("llama-bpe", "glm4"), "o200k_harmony": ("gpt-4o", "minimax-m2")}  # tokenizer.ggml.pre
NORMAL, CONTROL = 1, 3


def _written() -> dict[str, Any]:
    found = json.loads(TOKENS.read_text(encoding="utf-8")) if TOKENS.is_file() else {}
    return dict(found["encodings"]) if found.get("version") == version() else {}


ANSWERS = _written()
pytestmark = pytest.mark.skipif(not ANSWERS, reason="no tokens of tiktoken: make references")


def _letters() -> list[str]:
    """The letter that stands for each byte in GPT-2's form."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


def _fields(tokens: list[list[int] | str], cut: str) -> dict[str, Any]:
    letters = _letters()
    words = [token if isinstance(token, str) else "".join(letters[byte] for byte in token) for token in tokens]
    ranks = {bytes(token): rank for rank, token in enumerate(tokens) if not isinstance(token, str)}
    merges = []
    for token, rank in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:  # as it is put together of earlier tokens
            pairs = [(ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1)]
            lowest, at = min(pairs)
            assert lowest < rank
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(" ".join("".join(letters[byte] for byte in part) for part in parts))
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": cut, "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [CONTROL if isinstance(token, str) else NORMAL for token in tokens],
    }  # fmt: skip


@pytest.mark.parametrize(("name", "cut"), [(name, cut) for name in ENCODINGS for cut in CUTS[name]])
def test_ids_are_those_of_tiktoken(name: str, cut: str, tmp_path: Path) -> None:
    write_tokenizer(_fields(ANSWERS[name]["tokens"], cut), tmp_path, tmp_path / "m.gguf")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = ANSWERS[name]["texts"]
    assert len(texts) > 50
    for one in texts:
        assert tokenizer.encode(one["text"], add_special_tokens=False).ids == one["ids"], one["text"]
        assert tokenizer.decode(one["ids"], skip_special_tokens=False) == one["text"]
