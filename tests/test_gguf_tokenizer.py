"""Tokenizers rebuilt from a GGUF file's metadata: the same ids and the same text as the one that was written."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, pre_tokenizers

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


DEEPSEEK = "12 it's\n\n\u4e2da \u04bf\u02b0!  "
LIKE_LLAMA_3 = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx", "smaug-bpe",
    "chatglm-bpe", "glm4", "glm5",
)  # fmt: skip


@pytest.mark.parametrize(
    "cut, text, pieces",
    [
        ("llama-bpe", "12345 it's  a\n\nb", ["123", "45", " it", "'s", " ", " a", "\n\n", "b"]),
        ("qwen2", "123 it's  a\n\nb", ["1", "2", "3", " it", "'s", " ", " a", "\n\n", "b"]),
        ("gpt-2", "123 it's  a\n\nb", ["123", " it", "'s", " ", " a", "\n", "\n", "b"]),
        ("smollm", "123 it", ["1", "2", "3", " it"]),
        ("tekken", "12 HelloWorld", ["1", "2", " Hello", "World"]),
        ("qwen35", "12 ye\u0301s e\u0301!", ["1", "2", " ye\u0301s", " e\u0301", "!"]),
        ("qwen2", "ye\u0301s", ["ye", "\u0301s"]),
        ("bloom", "12 it's a, b", ["12", " it's", " a", ",", " b"]),
        ("deepseek-llm", DEEPSEEK, ["1", "2", " it", "'", "s", "\n", "\n", "\u4e2d", "a", " \u04bf", "\u02b0", "!", "  "]),
        ("deepseek-coder", DEEPSEEK, ["1", "2", " it", "'", "s", "\n", "\n", "\u4e2d", "a", " \u04bf\u02b0", "!", "  "]),
        (
            "deepseek-v3", "1234 it's x=[y\n\u304b\u4e2da, \u20ac!",
            ["123", "4", " it", "'s", " x", "=[", "y", "\n", "\u304b\u4e2d", "a", ",", " \u20ac!"],
        ),
        (
            "kimi-k2", "1234 HelloWorld'S,/\n/ \u4e2d\u3007a",
            ["123", "4", " Hello", "World'S", ",/\n", "/", " ", "\u4e2d\u3007", "a"],
        ),
        *((name, "12345 it'S", ["123", "45", " it", "'S"]) for name in LIKE_LLAMA_3),
        *((name, "123 it'S", ["1", "2", "3", " it", "'S"]) for name in ("deepseek-r1-qwen", "kormo", "megrez", "stablelm2")),
        *((name, "1234 HelloWorld'S", ["123", "4", " Hello", "World'S"]) for name in ("llama4", "minimax-m2", "gpt-4o")),
        *((name, "12 it'S", ["1", "2", " it", "'", "S"]) for name in ("starcoder", "minerva-7b")),
        *((name, "12 it'S", ["12", " it", "'", "S"]) for name in ("default", "trillion", "exaone4", "a.x-4.0")),
        *((alias, "123 it's a", ["123", " it's", " a"]) for alias in ("gpt-4o", "minimax-m2")),
    ],
)  # fmt: skip
def test_texts_are_cut_as_the_families_cut_them(tmp_path: Path, cut: str, text: str, pieces: list[str]) -> None:
    """With every possible merge a piece of the text becomes one token, which shows where it was cut."""
    words = [_byte_letters(piece) for piece in pieces]
    tokens = list(dict.fromkeys(["\u0120", *"".join(words), *(w[:n] for w in words for n in range(2, len(w) + 1))]))
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


@pytest.mark.parametrize(
    "cut, is_begun, is_whole",
    [
        ("llama-bpe", True, True),
        ("llama3", True, True),
        ("tekken", True, True),
        ("qwen2", False, False),
        ("dbrx", False, False),
    ],
)
def test_what_a_kind_does_where_the_file_does_not_say(tmp_path: Path, cut: str, is_begun: bool, is_whole: bool) -> None:
    """Whether a text has a beginning, and whether a word that is a token stays whole though no merge makes it."""
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": cut,
        "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
    }
    for said in (None, True, False):
        codec = _codec(tmp_path, fields if said is None else {**fields, "tokenizer.ggml.add_bos_token": said})
        begin = [0] if (is_begun if said is None else said) else []
        assert codec.encode("ab") == [*begin, *([3] if is_whole else [1, 2])]


def _byte_letters(text: str) -> str:
    """How GPT-2's vocabulary writes its bytes."""
    ((written, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return written


@pytest.mark.parametrize(
    ("name", "is_whole", "has_bos"),
    [
        *((name, True, True) for name in (*LIKE_LLAMA_3[:8], "tekken")),
        *((name, True, False) for name in ("glm4", "glm5")),
        *((name, False, False) for name in ("dbrx", "smaug-bpe", "chatglm-bpe", "qwen2", "gpt-4o", "default")),
    ],
)
def test_whole_words_and_the_beginning_are_as_llama_cpp_has_them(
    tmp_path: Path, name: str, is_whole: bool, has_bos: bool
) -> None:
    """A word that no merges lead to; and files that do not say whether texts begin with an id of their own."""
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3],
        "tokenizer.ggml.bos_token_id": 3,
    }
    assert _codec(tmp_path, fields).encode("ab") == [3] * has_bos + ([2] if is_whole else [0, 1])


def test_an_unknown_way_of_cutting_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}
    for name in ("default", "gpt-2", "lfm2", "smollm", "no-such"):
        _codec(tmp_path, {**fields, "tokenizer.ggml.pre": name})
        assert ("no-such" in caplog.text) is (name == "no-such")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("is_whole", [True, False])
def test_marks_of_phi_3_take_the_blanks_behind_them(tmp_path: Path, is_whole: bool) -> None:
    """As the tokenizer does that the model was trained with; its file says nothing of it. One mark alone is another's."""
    marks = ["<|user|>", "<|endoftext|>", *(["<|assistant|>", "<|end|>"] if is_whole else [])]
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "\u2581a", *marks]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [2, 3, 4, 1, 1, 1, *[3] * len(marks)],
    }
    write_tokenizer(fields, tmp_path, Path("m.gguf"))
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for mark, is_stripped in (("<|user|>", True), ("</s>", True), ("<s>", False), ("<|endoftext|>", False)):
        pieces = made.encode(f"{mark}  a", add_special_tokens=False).tokens
        assert (pieces[1:] == ["\u2581a"]) is (is_stripped and is_whole), mark


def test_marks_of_a_byte_level_tokenizer_take_nothing(tmp_path: Path) -> None:
    """Phi 4 mini has the same marks, and its blanks stay."""
    tokens = ["a", "\u0120", "<|user|>", "<|assistant|>", "<|end|>"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 1, 3, 3, 3],
    }
    write_tokenizer(fields, tmp_path, Path("m.gguf"))
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert made.encode("<|user|> a", add_special_tokens=False).tokens == ["<|user|>", "\u0120", "a"]


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


def test_pieces_that_are_merged_in_the_order_of_a_list_have_llama_cpps_ids(tmp_path: Path) -> None:
    """Gemma 4's kind, against what llama-cpp-python 0.3.36 gives for this vocabulary."""
    merges = ["a b", "▁ ab", "ab c", "\n \n", "▁ab c", "d e", "▁ ▁", "c ▁ab"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
    pieces = ["▁", "a", "b", "c", "\n", "d", "e", *(one.replace(" ", "") for one in merges)]
    tokens = [*special, *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    fields = {
        "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1,
    }  # fmt: skip
    write_tokenizer(fields, tmp_path, Path("m.gguf"))
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    of_llama_cpp = {
        "ab abc  ab": [269, 273, 262, 270],
        "abc\n\nab\n": [271, 272, 269, 266],
        "c abé de 中 ab<turn|>ab": [276, 201, 175, 262, 274, 262, 234, 190, 179, 270, 5, 269],
        "a\n\n\nb": [263, 272, 266, 264],
        " ab": [270],
        "ed  de": [268, 267, 275, 274],
    }
    for text, ids in of_llama_cpp.items():
        assert made.encode(text).ids == ids and made.decode(ids, skip_special_tokens=False) == text
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["add_bos_token"] is True
