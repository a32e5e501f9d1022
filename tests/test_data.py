"""Text to token files: exact round trips, number types, files that appear whole, and one clear line for bad input."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi.errors import CheckpointError, UsageError
from mdi.files import replacing
from mdi.spec.options import Options
from mdi.spec.parser import Parser
from mdi_training import prepare_data_command as cli_data
from mdi_training.data import (
    encode_texts,
    id_type,
    load_data_set,
    write_data_set,
)
from mdi_training.texts import find_texts, pieces, read_text
from mdi_training.vocabulary import EOS_TOKEN, Vocabulary, load_vocabulary, train_vocabulary

TEXT = "The cat sat on the mat.\n\n  Was it the cat?\r\nIt was; the dog\tslept.\n" * 40
FOREIGN = "Grüße, 世界! \U0001f600 e\u0301 \u200f עברית \x00\x7f\ufeff \u2028 end  \n\n\t "


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return train_vocabulary([TEXT], 300)


def prepare(*argv: object) -> int:
    parser = Parser(Options)
    cli_data.add_arguments(parser)
    return cli_data.run(parser.parse_args([str(arg) for arg in argv]))


def fake_vocabulary(size: int) -> Vocabulary:
    """One id per code point, far apart, so that small texts need large ids."""
    return Vocabulary(
        size=size,
        eos_id=None,
        encode=lambda text: [size - 1 - ord(c) for c in text],
        decode=lambda ids: "".join(chr(size - 1 - i) for i in ids),
        _files={"tokenizer.json": b"{}"},
    )


def test_text_of_any_script_comes_back_exactly(vocabulary: Vocabulary) -> None:
    for text in (TEXT, FOREIGN, " leading", "trailing ", "\r\n", EOS_TOKEN, f"a{EOS_TOKEN}b"):
        assert vocabulary.decode(vocabulary.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_comes_back_exactly(vocabulary: Vocabulary, text: str) -> None:
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_litgpt_reads_the_tokenizer(tmp_path: Path) -> None:
    from litgpt.tokenizer import Tokenizer

    source = tmp_path / "text.txt"
    source.write_text(TEXT, encoding="utf-8")
    assert prepare(source, "--out", tmp_path / "data", "--vocab-size", 300) == 0
    tokenizer = Tokenizer(tmp_path / "data")
    assert tokenizer.eos_id == tokenizer.token_to_id(EOS_TOKEN) == 0
    assert tokenizer.bos_id is None and not tokenizer.use_bos
    ids = tokenizer.encode(FOREIGN)
    assert tokenizer.decode(ids) == FOREIGN
    assert ids.tolist() == load_vocabulary(tmp_path / "data").encode(FOREIGN)


def test_prepared_folder_is_nine_to_one_and_decodes_to_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "text.txt"
    source.write_bytes(TEXT.encode())
    assert prepare(source, "--out", tmp_path / "new" / "data", "--vocab-size", 300) == 0
    assert "held out" in capsys.readouterr().out
    data = load_data_set(tmp_path / "new" / "data")
    meta = json.loads((data.folder / "meta.json").read_text())
    vocabulary = load_vocabulary(data.folder)
    assert meta["dtype"] == "uint16" and data.train.dtype == np.uint16
    assert meta["vocab_size"] == data.vocab_size == vocabulary.size <= 300
    assert len(data.train) == meta["n_train"] == (meta["n_train"] + meta["n_val"]) * 9 // 10
    assert vocabulary.decode([*data.train.tolist(), *data.val.tolist()]) == TEXT
    assert not list(data.folder.glob("*.part"))
    assert str(tmp_path) not in json.dumps(meta)


def test_the_text_folder_is_the_default_target_and_its_documents_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("second " * 60)
    (tmp_path / "a.txt").write_text("first " * 60)
    (tmp_path / "c.csv").write_text("not,read")
    assert prepare(tmp_path, "--vocab-size", 270) == 0
    data = load_data_set(tmp_path)
    whole = load_vocabulary(tmp_path).decode([*data.train.tolist(), *data.val.tolist()])
    assert whole == "first " * 60 + EOS_TOKEN + "second " * 60 + EOS_TOKEN


def test_a_given_tokenizer_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    prepare(tmp_path / "text.txt", "--out", tmp_path / "one", "--vocab-size", 300)
    prepare(tmp_path / "text.txt", "--out", tmp_path / "two", "--tokenizer", tmp_path / "one" / "tokenizer.json")
    for name in ("train.bin", "val.bin", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(("size", "name"), [(65_536, "uint16"), (65_537, "uint32"), (128_256, "uint32")])
def test_large_vocabularies_do_not_wrap(tmp_path: Path, size: int, name: str) -> None:
    assert id_type(size).name == name
    vocabulary = fake_vocabulary(size)
    with tempfile.TemporaryFile() as file:
        ids = encode_texts(["\x00" + TEXT], vocabulary, file, with_ends=False)
    meta = write_data_set(tmp_path, ids, vocabulary, [])
    data = load_data_set(tmp_path)
    assert meta["dtype"] == data.train.dtype.name == name
    assert int(data.train[0]) == size - 1
    assert vocabulary.decode([*data.train.tolist(), *data.val.tolist()]) == "\x00" + TEXT


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="ab \n\r\t"), n_chars=st.integers(1, 8))
def test_pieces_encode_like_the_whole(vocabulary: Vocabulary, text: str, n_chars: int) -> None:
    cut = list(pieces(text, n_chars))
    assert "".join(cut) == text
    assert [i for piece in cut for i in vocabulary.encode(piece)] == vocabulary.encode(text)


def test_missing_text_names_the_nearest_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        find_texts(tmp_path / "no" / "such.txt")
    assert str(tmp_path / "no" / "such.txt") in str(caught.value)
    assert f"nearest that does is {tmp_path})" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"", "empty"), (b" \n\t\n", "empty"), (b"caf\xe9 au lait", "unreadable")],
)
def test_bad_text_is_one_line(tmp_path: Path, content: bytes, code: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_text(path)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_short_text_and_empty_folder_write_nothing(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("too short")
    with pytest.raises(UsageError) as caught:
        prepare(source, "--out", tmp_path / "out", "--tokenizer", _byte_tokenizer(tmp_path))
    assert caught.value.code == "short"
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError) as caught:
        find_texts(tmp_path / "empty")
    assert caught.value.code == "empty"


def _byte_tokenizer(folder: Path) -> Path:
    vocabulary = train_vocabulary(["a"], 257)
    (folder / "bytes.json").write_bytes(vocabulary.files()["tokenizer.json"])
    return folder / "bytes.json"


def test_bad_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        train_vocabulary([TEXT], 256)
    assert caught.value.code == "value"
    with pytest.raises(UsageError) as caught:
        load_vocabulary(tmp_path / "none")
    assert caught.value.code == "missing"
    with pytest.raises(UsageError) as caught:
        load_vocabulary(tmp_path)
    assert caught.value.code == "missing"
    for name in ("tokenizer.json", "tokenizer.model"):
        (tmp_path / name).write_bytes(b"{]")
        with pytest.raises(UsageError) as caught:
            load_vocabulary(tmp_path / name)
        assert caught.value.code == "unreadable"


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda d: (d / "meta.json").unlink(), "missing"),
        (lambda d: (d / "meta.json").write_text("{"), "unreadable"),
        (lambda d: (d / "meta.json").write_text('{"dtype": "int8"}'), "unreadable"),
        (lambda d: (d / "val.bin").unlink(), "damaged"),
        (lambda d: (d / "train.bin").write_bytes(b"\0\0"), "damaged"),
        (lambda d: (d / "train.bin").write_bytes((d / "train.bin").read_bytes()[::-1]), "damaged"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "damaged"),
        (lambda d: (d / "tokenizer.json").unlink(), "damaged"),
    ],
)
def test_a_damaged_data_set_is_refused(tmp_path: Path, damage: object, code: str) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    prepare(tmp_path / "text.txt", "--vocab-size", 300)
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(UsageError) as caught:
        load_data_set(tmp_path)
    assert caught.value.code == code
    assert str(tmp_path) in str(caught.value) and "prepare-data" in str(caught.value)


def test_the_output_folder_cannot_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(UsageError) as caught:
        prepare(tmp_path / "text.txt", "--out", tmp_path / "text.txt" / "below", "--vocab-size", 300)
    assert caught.value.code == "unwritable"


def test_a_full_disk_leaves_the_old_file_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(CheckpointError) as e, replacing(path):
        raise OSError(28, "No space left on device")
    assert str(path) in str(e.value) and "No space left" in str(e.value)
    assert path.read_bytes() == b"old"


def test_several_processes_give_the_same_ids(tmp_path: Path) -> None:
    """In order, with ends between the texts, however many pieces there are."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(7):
        (texts / f"{i}.txt").write_text(f"{i}: {TEXT * (i + 1)}", encoding="utf-8")
    assert prepare(texts, "--out", tmp_path / "one", "--vocab-size", 300) == 0
    assert prepare(texts, "--out", tmp_path / "two", "--tokenizer", tmp_path / "one", "--workers", 2) == 0
    for name in ("train.bin", "val.bin"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_a_number_of_workers_that_makes_no_sense(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(UsageError):
        prepare(tmp_path / "text.txt", "--vocab-size", 300, "--workers", 0)
