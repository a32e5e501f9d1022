"""A folder whose only tokenizer is `tiktoken.model`: what is refused, and where what is made lies."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.download import choose_files
from mdi.checkpoint.gguf_export import export_gguf
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.source import LitCheckpoint
from mdi.checkpoint.token_ranks import made_of_ranks
from mdi.errors import CheckpointError, UsageError
from mdi.serve.grammar import GrammarSource
from mdi.text.texts import TextCodec
from mdi.text.tokenizer import tokenizer_json
from tiny_checkpoint import write_checkpoint

BYTES = [bytes([byte]) for byte in range(256)]
CLASS = {"tokenizer_class": "TikTokenTokenizer"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MDI_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder: Path, tokens: list[bytes], settings: dict[str, Any] | None = None, more: bytes = b"") -> Path:
    folder.mkdir(exist_ok=True)
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines) + more)
    (folder / "tokenizer_config.json").write_text(json.dumps(CLASS if settings is None else settings), encoding="utf-8")
    return folder


def test_a_token_is_made_of_those_that_are_joined_last(tmp_path: Path) -> None:
    """ "abc" by "bc", though "ab" is a token as well; "xyz" by no merges, so that only the whole word is it."""
    folder = write(tmp_path / "made", [*BYTES, b"bc", b"ab", b"abc", b"xyz"])
    codec = TextCodec.from_checkpoint(folder, prompt_style="none")
    assert codec.vocab_size == 260 + 256
    assert [codec.encode(text) for text in ("abc", "abcd", "dab", "xyz", "xyzd")] == [
        [258], [258, *b"d"], [*b"d", 257], [259], [*b"xyzd"],
    ]  # fmt: skip
    assert codec.token_bytes(259) == b"xyz" and codec.encode("<|reserved_token_300|>") == [300]
    merges = json.loads(made_of_ranks(folder).read_bytes())["model"]["merges"]
    assert merges == [["b", "c"], ["a", "b"], ["a", "bc"]]


def test_what_is_made_lies_in_the_cache_and_is_made_again_for_other_names(tmp_path: Path, cache: Path) -> None:
    folder = write(tmp_path / "made", BYTES)
    first = made_of_ranks(folder)
    written = first.stat().st_mtime_ns
    assert cache in first.parents and made_of_ranks(folder) == first and first.stat().st_mtime_ns == written
    write(folder, BYTES, {**CLASS, "added_tokens_decoder": {"256": {"content": "[BOS]", "special": True}}})
    assert made_of_ranks(folder) != first and not (folder / "tokenizer.json").exists()
    (folder / "tokenizer.json").write_bytes(first.read_bytes())
    assert tokenizer_json(folder) == folder / "tokenizer.json", "the folder's own goes first"


def test_blank_lines_are_skipped_and_special_tokens_found_by_number(tmp_path: Path) -> None:
    settings = {**CLASS, "added_tokens_decoder": {"0256": {"content": "[BOS]", "special": True}}}
    folder = write(tmp_path / "made", BYTES, settings, b"\n\r\n")
    assert TextCodec.from_checkpoint(folder, prompt_style="none").encode("a[BOS]") == [ord("a"), 256]
    write(folder, BYTES, {**CLASS, "added_tokens_decoder": None}, b"\n")
    codec = TextCodec.from_checkpoint(folder, prompt_style="none")
    assert codec.encode("<|reserved_token_256|>") == [256]


def test_a_model_of_sentencepiece_goes_before_ranks(tmp_path: Path) -> None:
    """For all that reads tokenizers, so that grammars and GGUF files have the ids of texts."""
    source = LitCheckpoint(write_checkpoint(tmp_path / "tiny"))
    (source.path / "tokenizer.json").unlink()
    write(source.path, [])
    (source.path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match="tokenizer.model"):
        TextCodec.from_checkpoint(source.path, prompt_style="none")
    assert tokenizer_json(source.path) is None
    with pytest.raises(UsageError, match="needs a model with a tokenizer.json"):
        GrammarSource(source.path, [], 320)
    with pytest.raises(CheckpointError, match="has no tokenizer.json, from which"):
        export_gguf(PackedSource(source, Packing("float32", "float32")), source.path, tmp_path / "out.gguf")


BROKEN: dict[str, tuple[list[bytes], dict[str, Any] | None, bytes, str]] = {
    "no base64": (BYTES, None, b"!!! 256\n", "line 257 is not a byte string in base64 and its rank"),
    "no rank": (BYTES, None, b"YWI=\n", "line 257"),
    "a rank twice": (BYTES, None, b"YWI= 3\n", "ranks are not 0, 1, 2"),
    "a rank is left out": (BYTES, None, b"YWI= 257\n", "ranks are not 0, 1, 2"),
    "no single bytes": ([*BYTES[:7], *BYTES[8:]], None, b"", "lacks single bytes"),
    "a token that has no end": ([*BYTES, b"a" * 5000], None, b"", "more than 4096 bytes"),
    "many that are long": ([*BYTES, *(b"a" * n for n in range(2, 4097))], None, b"", "its tokens are too long"),
    "a file that is too large": (BYTES, None, b"\n" * 16_000_000, "and may have 16.0 MB"),
    "nothing": ([], None, b"", "lacks single bytes"),
    "another class": (BYTES, {"tokenizer_class": "Other"}, b"", "does not name the class TikTokenTokenizer"),
    "settings that are a list": (BYTES, [], b"", "cannot be used"),  # type: ignore[dict-item]
    "a special token among the ranks": (
        BYTES, {**CLASS, "added_tokens_decoder": {"255": {"content": "[BOS]"}}}, b"", "are not 256 to 511",
    ),
    "a special token behind them": (
        BYTES, {**CLASS, "added_tokens_decoder": {"512": {"content": "[BOS]"}}}, b"", "are not 256 to 511",
    ),
    "a special token that is a word": (
        BYTES, {**CLASS, "added_tokens_decoder": {"256": {"content": "a"}}}, b"", "it has a token twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_damaged_files_and_other_kinds_are_refused(case: str, tmp_path: Path, cache: Path) -> None:
    tokens, settings, more, why = BROKEN[case]
    folder = write(tmp_path / "made", tokens, settings, more)
    with pytest.raises(CheckpointError, match=why):
        made_of_ranks(folder)
    assert not list(cache.rglob("*.json"))


def test_the_names_of_special_tokens_are_needed(tmp_path: Path) -> None:
    folder = write(tmp_path / "made", BYTES)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="needs the tokenizer_config.json beside it"):
        TextCodec.from_checkpoint(folder, prompt_style="none")


def test_it_is_downloaded() -> None:
    names = ["config.json", "model-00001-of-00001.safetensors", "tiktoken.model", "tokenization_kimi.py"]
    assert choose_files(names) == ["config.json", "model-00001-of-00001.safetensors", "tiktoken.model"]
