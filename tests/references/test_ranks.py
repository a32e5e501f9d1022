"""What is made of a folder's `tiktoken.model` gives the ids of tiktoken, with Kimi's pattern and special tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdi.checkpoint.gguftokenizer import tokenizer_fields, write_tokenizer
from mdi.text.texts import TextCodec
from mdi.text.tokenizer import FileTokenizer, tokenizer_json
from references.write_ranks import CASES, version

FOLDER = Path(__file__).parents[2] / ".venv-references" / "ranks"
TEMPLATE = (
    "{% for message in messages %}<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{{ message.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)


def _is_written() -> bool:
    written = FOLDER / "version.txt"
    return written.is_file() and written.read_text(encoding="utf-8") == version()


pytestmark = pytest.mark.skipif(not _is_written(), reason="no tokens of tiktoken: make references")


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MDI_CACHE_DIR", str(tmp_path / "cache"))
    found = tmp_path / request.param
    shutil.copytree(FOLDER / request.param, found)
    (found / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    n_ranks = len((found / "tiktoken.model").read_bytes().splitlines())
    (found / "generation_config.json").write_text(json.dumps({"eos_token_id": n_ranks + 2}), encoding="utf-8")
    return found


def texts_of(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "texts.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("folder", CASES, indirect=True)
def test_ids_are_those_of_tiktoken(folder: Path) -> None:
    codec = TextCodec.from_checkpoint(folder)
    tokenizer, texts = FileTokenizer(folder, codec.facts()), texts_of(folder)
    assert len(texts) > 200
    for one in texts:
        assert tokenizer.encode_rendered(one["text"]) == one["ids"], one["text"]
        assert tokenizer.processor.decode(one["ids"], skip_special_tokens=False) == one["text"]
    assert not (folder / "tokenizer.json").exists()


@pytest.mark.parametrize("folder", ["learned"], indirect=True)
def test_a_chat_has_the_ids_of_its_marks(folder: Path) -> None:
    codec = TextCodec.from_checkpoint(folder)
    n = len((folder / "tiktoken.model").read_bytes().splitlines())
    try:
        ids = codec.encode_prompt([{"role": "user", "content": "你好"}])
    finally:
        codec.close()
    assert [i - n for i in ids if i >= n] == [3, 17, 2, 4, 17]
    assert codec.eos_ids == {n + 2, n + 1} and codec.first_id is None
    shown = codec.decode(texts_of(folder)[-1]["ids"])
    assert shown == "user你好 Kimi<|tool_calls_section_begin|><|no mark|> ", "only what is special is nothing"


@pytest.mark.parametrize("folder", CASES, indirect=True)
def test_a_gguf_file_has_the_same_tokenizer(folder: Path, tmp_path: Path) -> None:
    made, texts = tokenizer_json(folder), texts_of(folder)
    n_tokens = 256 + len((folder / "tiktoken.model").read_bytes().splitlines())
    fields = tokenizer_fields(folder, n_tokens + 8, made)
    assert fields["tokenizer.ggml.pre"] == "kimi-k2"
    (again := tmp_path / "again").mkdir()
    write_tokenizer(fields, again, tmp_path / "m.gguf")
    codec = TextCodec.from_checkpoint(again)
    tokenizer = FileTokenizer(again, codec.facts())
    assert all(tokenizer.encode_rendered(one["text"]) == one["ids"] for one in texts)
