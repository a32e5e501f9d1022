"""Tokenizers rebuilt from a GGUF file's metadata: the same ids and the same text as the one that was written."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from gguf_files import byte_level_tokens, sentencepiece_tokens
from mdi.checkpoint.gguftokenizer import write_tokenizer
from mdi.errors import CheckpointError
from mdi.text.texts import TextCodec
from tiny_checkpoint import END, TEXT, tokenizer

WORDS = TEXT.split()
TEXTS = [
    TEXT,
    "The ring",
    "  two  spaces,   three",
    "line\n\n\nafter line\n",
    "1234567 and 89",
    "don't I'll WE'RE",
    "Grüße, 世界 🙂 \t end ",
    "",
    " ".join(random.Random(3).choices([*WORDS, "\n", "x1y2", "—", "'s"], k=200)),
]


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    folder = tmp_path_factory.mktemp("spm")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((TEXT + "\n") for _ in range(20)),
        model_prefix=str(folder / "spm"),
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))


def _codec(folder: Path, fields: dict[str, Any], style: str = "auto") -> TextCodec:
    write_tokenizer(fields, folder, Path("m.gguf"))
    return TextCodec.from_checkpoint(folder, style, config_name="my-model")


def test_byte_level(tmp_path: Path) -> None:
    written = tokenizer()
    fields = byte_level_tokens(json.loads(written.to_str()), **{"tokenizer.ggml.eos_token_id": 0})
    codec = _codec(tmp_path, fields)
    for text in TEXTS:
        ids = written.encode(text).ids
        assert codec.encode(text) == ids
        assert codec.decode(ids) == text
    assert codec.eos_ids == {written.token_to_id(END)} and codec.prompt_style is None
    assert codec.encode(f"a{END}b")[1] == 0


def test_sentencepiece(tmp_path: Path, spm: sentencepiece.SentencePieceProcessor) -> None:
    codec = _codec(tmp_path, sentencepiece_tokens(spm))
    for text in TEXTS:
        ids = spm.encode(text)
        assert codec.encode(text) == [spm.bos_id(), *ids]
        assert codec.decode(ids) == spm.decode(ids)
    assert codec.eos_ids == {spm.eos_id()}


@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_beginning_is_as_the_file_says(
    tmp_path: Path, spm: sentencepiece.SentencePieceProcessor, adds_bos: bool
) -> None:
    codec = _codec(tmp_path, sentencepiece_tokens(spm, **{"tokenizer.ggml.add_bos_token": adds_bos}))
    assert (codec.encode("The ring")[0] == spm.bos_id()) is adds_bos


@pytest.mark.parametrize(
    "cut, text, pieces",
    [
        ("llama-bpe", "12345 it's  a\n\nb", ["123", "45", " it", "'s", " ", " a", "\n\n", "b"]),
        ("qwen2", "123 it's  a\n\nb", ["1", "2", "3", " it", "'s", " ", " a", "\n\n", "b"]),
        ("gpt-2", "123 it's  a\n\nb", ["123", " it", "'s", " ", " a", "\n", "\n", "b"]),
        ("smollm", "123 it", ["1", "2", "3", " it"]),
        ("tekken", "12 HelloWorld", ["1", "2", " Hello", "World"]),
    ],
)
def test_texts_are_cut_as_the_families_cut_them(tmp_path: Path, cut: str, text: str, pieces: list[str]) -> None:
    """With every possible merge a piece of the text becomes one token, which shows where it was cut."""
    letters = {c: t for c, t in zip(text, [_byte_letter(c) for c in text], strict=True)}
    words = ["".join(letters[c] for c in piece) for piece in pieces]
    tokens = list(dict.fromkeys([*letters.values(), *(w[:n] for w in words for n in range(2, len(w) + 1))]))
    longer = [t for t in tokens if len(t) > 1]
    joined = ["".join(words[i : i + 2]) for i in range(len(words) - 1)]
    merges = [f"{t[:-1]} {t[-1]}" for t in longer] + [f"{a} {b}" for a, b in zip(words, words[1:], strict=False)]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": cut,
        "tokenizer.ggml.tokens": [*tokens, *(j for j in dict.fromkeys(joined) if j not in tokens)],
        "tokenizer.ggml.merges": list(dict.fromkeys(merges)),
    }
    codec = _codec(tmp_path, fields)
    assert [codec.decode([i]) for i in codec.encode(text)] == pieces


def _byte_letter(character: str) -> str:
    """How GPT-2's vocabulary writes a byte."""
    return {" ": "Ġ", "\n": "Ċ"}.get(character, character)


def test_the_chat_template_is_kept(tmp_path: Path, spm: sentencepiece.SentencePieceProcessor) -> None:
    template = "{{'<|start_header_id|>' + role}}"
    codec = _codec(tmp_path, sentencepiece_tokens(spm, **{"tokenizer.chat_template": template}))
    assert codec.prompt_style is not None
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == template


def test_the_chat_template_for_tools_is_kept_too(tmp_path: Path, spm: sentencepiece.SentencePieceProcessor) -> None:
    both = {"tokenizer.chat_template": "{{a}}", "tokenizer.chat_template.tool_use": "{{tools}}"}
    write_tokenizer(sentencepiece_tokens(spm, **both), tmp_path, Path("m.gguf"))
    kept = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    assert kept == [{"name": "default", "template": "{{a}}"}, {"name": "tool_use", "template": "{{tools}}"}]


@pytest.mark.parametrize(
    "template, is_end",
    [(f"{{{{x}}}}{END}", True), (f"{{{{x}}}}{END}<|return|>", False), ("{{x}}", False), (None, False)],
)
def test_the_token_that_ends_a_turn_in_the_template_ends_a_text(
    tmp_path: Path, template: str | None, is_end: bool
) -> None:
    written = tokenizer()
    fields: dict[str, Any] = {"tokenizer.ggml.eos_token_id": 5}
    if template is not None:
        fields["tokenizer.chat_template"] = template
    codec = _codec(tmp_path, byte_level_tokens(json.loads(written.to_str()), **fields))
    assert codec.eos_ids == {5} | ({written.token_to_id(END)} if is_end else set())


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.ggml.model": "t5"},
        {"tokenizer.ggml.tokens": None},
        {"tokenizer.ggml.tokens": ["a", "a"]},
        {"tokenizer.ggml.scores": [0.0]},
        {"tokenizer.ggml.token_type": [1, 1]},
        {"tokenizer.ggml.eos_token_id": 1 << 31},
        {"tokenizer.ggml.bos_token_id": "first"},
        {"tokenizer.ggml.eot_token_id": "last"},
        {"tokenizer.huggingface.json": "{}"},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["ab"]},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["no such"]},
    ],
)
def test_a_damaged_tokenizer_is_one_line(
    tmp_path: Path, spm: sentencepiece.SentencePieceProcessor, change: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        write_tokenizer({**sentencepiece_tokens(spm), **change}, tmp_path, Path("m.gguf"))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
