"""The store of models: names, other places, locks, marks of what is loaded; and archives of one model."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gguf_files import byte_level_tokens, write_gguf
from hub_server import HubModel, HubServer
from mdi.checkpoint.download import choose_gguf, gguf_tag
from mdi.checkpoint.folder import gguf_file
from mdi.checkpoint.ggufsource import gguf_directory
from mdi.checkpoint.model_archive import export_model, import_model
from mdi.checkpoint.model_store import STATE, InUse, ModelStore, StoredModel, embedded_model
from mdi.checkpoint.pooling import pooling_of
from mdi.checkpoint.source import open_source
from mdi.cli import launch
from mdi.cli.session import found_chunk
from mdi.errors import CheckpointError, DownloadError, StoreError, UsageError
from mdi.serve.catalog import Catalog
from mdi.serve.operate import Operator
from tiny_checkpoint import tiny_config, tiny_gpt, tokenizer, write_checkpoint
from tiny_models import tiny_hf

TINY = ["--n-tokens", "8", "--temperature", "0", "--dtype", "float32", "--prompt-style", "none"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("MDI_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return ModelStore()


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    tokens = byte_level_tokens(json.loads(tokenizer().to_str()), **{"tokenizer.ggml.eos_token_id": 0})
    return write_gguf(
        tmp_path / "made" / "tiny.f32.gguf", "Llama-3.1-8B", tiny_config(), tiny_gpt().state_dict(), tokens=tokens
    )


@pytest.fixture
def hub(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hf, _ = tiny_hf(tmp_path / "hf")
    files = {path.name: path.read_bytes() for path in hf.iterdir() if path.is_file()}
    many = {"tiny-F32.gguf": gguf.read_bytes(), "tiny-Q8_0.gguf": b"not asked for", "README.md": b"x"}
    with HubServer({"org/tiny": HubModel(files), "org/tiny-GGUF": HubModel(many)}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server
    from huggingface_hub import close_session

    close_session()


def test_run_fetches_a_gguf_file_once_and_answers(
    hub: HubServer, store: ModelStore, gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("run", [str(gguf), "The ring is", *TINY]) == 0
    expected = capsys.readouterr().out
    assert launch("run", ["org/tiny-GGUF:f32", "The ring", "is", *TINY]) == 0
    assert capsys.readouterr().out == expected and expected.strip()
    assert not [path for _, path, _ in hub.requests if "Q8_0" in path]
    hub.requests.clear()
    assert launch("run", ["tiny-GGUF", *TINY, "The ring is"]) == 0, "neither organisation nor tag is needed now"
    assert capsys.readouterr().out == expected
    assert store.last() == "org/tiny-GGUF:F32" and not hub.requests


@pytest.mark.parametrize("command", ["sample", "local-ring"])
def test_other_commands_fetch_a_name_as_well(
    hub: HubServer, store: ModelStore, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = ["--nodes", "1"] if command == "local-ring" else []
    assert launch(command, ["org/tiny", *nodes, "--prompt", "a", "--n-tokens", "2", "--json"]) == 0
    folder = store.folder / "org" / "tiny"
    assert json.loads(capsys.readouterr().out)["n_nodes"] == 1
    assert not (folder / "lit_model.pth").exists(), "the folder is read as it is"
    assert launch("sample", ["--ckpt", "org/none", "--n-tokens", "2"]) == 2, "--ckpt fetches nothing"


def test_the_embedded_model_needs_no_hub(store: ModelStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("sample", ["nano-llama", "--n-samples", "1", "--n-tokens", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["samples"]) == 1 and store.last() == "nano-llama"
    assert launch("sample", ["nano-lama", "--n-tokens", "2"]) == 2


def test_names(store: ModelStore) -> None:
    for name in ("org/first", "other/first", "org/second--Q4_K_M"):
        write_checkpoint(store.folder / name)
    assert [model.name for model in store.models()] == ["org/first", "org/second:Q4_K_M", "other/first"]
    found = {name: store.find(name) for name in ("org/second", "SECOND", "second:q4_k_m", "org/first", "third")}
    assert [None if model is None else model.name for model in found.values()] == [
        *["org/second:Q4_K_M"] * 3, "org/first", None,
    ]  # fmt: skip
    with pytest.raises(UsageError):
        store.find("first")  # of whom?
    assert "org/second:Q4_K_M" in store.describe_missing("org/secnd:Q4_K_M")
    assert "nano-llama" in store.describe_missing("nano-lama"), "which is there without being in the store"
    (store.folder / "org" / "second--Q4_K_M" / "lit_model.pth").unlink()
    assert store.find("second") is None


def page_state(catalog: Catalog) -> Any:
    """What the page's dialog of models looks at, of a server that has none loaded."""
    state = SimpleNamespace(statuses={}, is_serving=lambda name: False)
    models = SimpleNamespace(leaving=set())
    return SimpleNamespace(catalog=catalog, engine=SimpleNamespace(state=state), models=models)


def test_a_gguf_file_has_one_name(store: ModelStore, gguf: Path, tmp_path: Path) -> None:
    """The file's, not that of its publisher and not that of its folder in the store; a second file of this name has a hash."""
    folder = gguf_directory(gguf, store.folder)
    source = open_source(folder)
    source.close()
    assert source.model == "tiny.f32"
    catalog = Catalog(store.folder, folder)
    assert [model.name for model in store.models()] == ["tiny.f32"] == catalog.names() == [catalog.first_name]
    for name in ("tiny.f32", f"gguf/{folder.name}"):
        assert (found := store.find(name)) is not None and found.folder == folder, name
    (listed,) = asyncio.run(Operator(page_state(catalog)).models())["models"]
    assert gguf.stat().st_size < listed["bytes"] < gguf.stat().st_size + 1_000_000, "the file itself, wherever it lies"
    second = tmp_path / "other" / gguf.name
    second.parent.mkdir()
    second.write_bytes(gguf.read_bytes())
    gguf_directory(second, store.folder)
    names = {model.name for model in store.models()}
    assert len(names) == 2 and all(name.startswith("gguf/tiny.f32-") for name in names)
    with pytest.raises(UsageError):
        store.find("tiny.f32")  # which one?


@pytest.mark.parametrize("by_name", [False, True])
def test_what_an_earlier_version_read_from_a_gguf_file_is_read_again(
    store: ModelStore, gguf: Path, by_name: bool
) -> None:
    """Its tokenizer may have been read otherwise, as that of Phi 3 was."""
    folder = gguf_directory(gguf, store.folder)
    right = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(b"{}")
    assert gguf_directory(gguf, store.folder) == folder and (folder / "tokenizer.json").read_bytes() == b"{}"
    (folder / "gguf.json").write_text(json.dumps({"file": str(gguf)}))
    if by_name:
        (model,) = store.models()
        assert store.folder_of(model) == folder
    else:
        assert gguf_directory(gguf, store.folder) == folder
    assert (folder / "tokenizer.json").read_bytes() == right and gguf_file(folder) == gguf


def test_what_was_probably_meant_is_named(store: ModelStore, gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of GGUF files is no model, and a name with a letter too few is none of the hub's."""
    for wrong in (gguf.parent, gguf.with_name("tiny.f23.gguf"), Path("made") / "tiny.f3.gguf"):
        assert launch("run", [str(wrong), "The ring is"]) == 2
        error = capsys.readouterr().err
        assert error.count("error: ") == 1 and "LitGPT" not in error
        assert wrong.is_relative_to("made") or str(gguf) in error, wrong


def test_models_of_other_places_are_used_without_a_copy(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = tmp_path / "cache" / "models--org--cached" / "snapshots" / "abc"
    commit.parent.mkdir(parents=True)
    tiny_hf(tmp_path / "hf")[0].rename(commit)
    (commit.parents[1] / "refs").mkdir()
    (commit.parents[1] / "refs" / "main").write_text("abc")
    (commit / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n")
    model = store.find("cached")
    assert model is not None and (model.folder, model.licence, model.is_own) == (commit, "apache-2.0", False)
    before = sorted(commit.iterdir())
    assert launch("sample", ["org/cached", "--prompt", "a", "--n-tokens", "2", "--json"]) == 0
    assert sorted(commit.iterdir()) == before and not (store.folder / "org").exists()
    assert launch("rm", ["org/cached", "--yes"]) == 1 and commit.is_dir()
    weights = next(commit.glob("*.safetensors"))
    weights.unlink()
    assert store.find("cached") is None


def test_what_is_loaded_is_listed_and_not_removed(store: ModelStore, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(store.folder / "org" / "name")
    use = InUse(folder)
    use.show(["secondary0 10.0.0.2"])
    assert launch("rm", ["org/name", "--yes"]) == 1
    error = capsys.readouterr().err
    assert folder.is_dir() and f"process {os.getpid()}" in error and "10.0.0.2" in error
    assert launch("list", []) == 0
    assert f"process {os.getpid()}" in capsys.readouterr().out
    use.close()
    model = store.find("org/name")
    assert model is not None and not store.marks(model)
    assert launch("rm", ["org/name", "--yes"]) == 0 and not folder.exists()
    with pytest.raises(StoreError) as caught:
        InUse(folder)
    assert caught.value.code == "removed" and not list((store.folder / STATE).glob("use-*"))


def test_the_mark_of_a_process_that_was_killed_does_not_count(store: ModelStore) -> None:
    folder = write_checkpoint(store.folder / "org" / "name")
    code = f"import os; from pathlib import Path; from mdi.checkpoint.model_store import InUse; InUse(Path({str(folder)!r}));"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", f"{code} os._exit(0)"], check=True, timeout=60, env=environment)
    assert len(list((store.folder / STATE).glob("use-*"))) == 1
    model = store.find("org/name")
    assert model is not None and store.marks(model) == []
    store.remove(model)
    assert not folder.exists()


def test_two_processes_fetch_a_model_once(hub: HubServer, store: ModelStore) -> None:
    command = [sys.executable, "-m", "mdi.cli", "pull", "org/tiny"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    both = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[1] and process.returncode for process in both] in (
        [0, ""],
        ["", 0],
        [0, 0],
        ["", ""],
    )
    gets = [path for method, path, _ in hub.requests if method == "GET" and path.endswith("model.safetensors")]
    assert len(gets) == 1 and store.find("org/tiny") is not None


def test_an_unfinished_download_is_listed_and_can_be_removed(hub: HubServer, store: ModelStore) -> None:
    hub.models["org/tiny"].cut_after["model.safetensors"] = 1000
    with pytest.raises(DownloadError):
        store.fetch("org/tiny", progress=False)
    assert not store.models()
    (model,) = store.all()
    assert (model.name, model.is_whole) == ("org/tiny", False)
    assert all("mdi pull org/tiny`" in store.describe_missing(name) for name in ("tiny", "Org/tiny"))
    assert launch("rm", ["org/tiny", "--yes"]) == 0 and not store.all()


def test_a_store_that_cannot_be_written(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreError) as caught:
        ModelStore(tmp_path / "file" / "store").fetch("org/tiny")
    assert caught.value.code == "store" and not hub.requests
    InUse(write_checkpoint(tmp_path / "tiny")).close()  # a run needs no mark


def test_gguf_files_of_a_repository() -> None:
    names = ["a-Q4_K_M.gguf", "a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf", "mmproj-F16.gguf", "x.txt"]
    assert choose_gguf(names, "org/a", None) == ["a-Q4_K_M.gguf"]
    assert choose_gguf(names, "org/a", "q8_0") == names[1:3]
    for tag in ("Q4_K_S", "F16"):
        with pytest.raises(DownloadError) as caught:
            choose_gguf(names, "org/a", tag)
        assert caught.value.code == "no_files" and "Q8_0" in str(caught.value)
    assert [gguf_tag(name) for name in ("tiny.gguf", "a.IQ2_XS.gguf", "b-bf16.gguf", "c.bin")] == [
        "tiny", "IQ2_XS", "BF16", None,
    ]  # fmt: skip


# Archives


@pytest.mark.parametrize("form", ["lit", "hf", "gguf"])
def test_a_model_goes_to_another_machine(
    hub: HubServer, store: ModelStore, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = {"lit": "org/lit", "hf": "org/tiny", "gguf": "org/tiny-GGUF:F32"}[form]
    folder = write_checkpoint(store.folder / "org" / "lit") if form == "lit" else store.fetch(name, progress=False)
    file = tmp_path / "model.mdi"
    assert launch("export", [name, str(file)]) == 0
    hub.requests.clear()
    other = ModelStore(tmp_path / "other")
    capsys.readouterr()
    assert launch("import", [str(file), "--store", str(other.folder)]) == 0
    assert f"mdi run --store {other.folder} " in capsys.readouterr().out, "as it is found there"
    for flags in ([], ["--store", str(other.folder)]):
        assert launch("sample", [name, *flags, "--prompt", "a", "--n-tokens", "4", "--temperature", "0", "--json"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('{"samples"')]
    here, there = ([sample["token_ids"] for sample in json.loads(line)["samples"]] for line in lines)
    assert here == there and not hub.requests
    assert launch("import", [str(file), "--store", str(other.folder)]) == 1, "it is there"
    assert folder.is_dir() and not list((other.folder / STATE).glob("import-*"))


def test_how_a_model_pools_its_rows_goes_along(store: ModelStore, tmp_path: Path) -> None:
    folder = write_checkpoint(store.folder / "org" / "name")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (model,) = store.models()
    export_model(model, tmp_path / "model.mdi")
    assert pooling_of(import_model(ModelStore(tmp_path / "other"), tmp_path / "model.mdi")[1]) == "mean"


@pytest.fixture
def archive(store: ModelStore, tmp_path: Path) -> Path:
    write_checkpoint(store.folder / "org" / "name")
    model = store.find("org/name")
    assert model is not None
    export_model(model, tmp_path / "good.mdi")
    return tmp_path / "good.mdi"


def _refused(archive: Path, content: bytes, tmp_path: Path) -> None:
    archive.write_bytes(content)
    target = ModelStore(tmp_path / "target")
    with pytest.raises(StoreError):
        import_model(target, archive)
    assert not target.all() and not list(target.folder.glob("[!.]*")) and not list(target.folder.glob(".mdi/import-*"))


def test_archives_that_are_damaged(archive: Path, tmp_path: Path) -> None:
    good = archive.read_bytes()
    third = good.index(b"lit_model.pth", 1024)  # the header of the weights
    flipped = bytearray(good)
    flipped[third + 5000] ^= 1
    for content in (
        b"",
        b"no archive",
        good[:-5000],
        good[:700],
        bytes(flipped),
        good.replace(b"mdi-model.json", b"mdi-other.json"),
    ):
        _refused(archive, content, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../../etc"},
        {"name": "/etc/x"},
        {"name": ".mdi"},
        {"name": "a/b/c"},
        {"format": 2},
        {"files": {}},
        {"files": {"../x": {"size": 0, "sha256": "0" * 64}}},
        {"files": {"/x": {"size": 0, "sha256": "0" * 64}}},
        {"files": {".mdi": {"size": 0, "sha256": "0" * 64}}},
        {"files": {"x": {"size": 1 << 49, "sha256": "0" * 64}}},
        {"files": {"x": {"size": -1, "sha256": "0" * 64}}},
        {"files": {f"x{i}": {"size": 0, "sha256": "0" * 64} for i in range(10_001)}},
    ],
)
def test_archives_that_ask_for_too_much(archive: Path, tmp_path: Path, change: dict[str, object]) -> None:
    with tarfile.open(archive) as tar:
        listed = tar.extractfile("mdi-model.json")
        assert listed is not None
        head = json.dumps({**json.load(listed), **change}).encode()
    entry = tarfile.TarInfo("mdi-model.json")
    entry.size = len(head)
    _refused(archive, entry.tobuf(tarfile.GNU_FORMAT) + head + bytes(-len(head) % 512) + bytes(1024), tmp_path)


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.GNUTYPE_SPARSE]
)
def test_archives_with_something_else_than_files(archive: Path, tmp_path: Path, kind: bytes) -> None:
    good = archive.read_bytes()
    start = good.index(b"lit_model.pth", 1024)
    other = tarfile.TarInfo.frombuf(good[start : start + 512], "utf-8", "strict")
    other.type, other.linkname = kind, "/etc/passwd"
    header = other.tobuf(tarfile.GNU_FORMAT)
    assert int(header[124:135], 8) in (0, other.size)  # tarfile writes no size for a link
    size = f"{other.size:011o}".encode()
    fixed = bytearray(header[:124] + size + header[135:148] + b" " * 8 + header[156:])
    fixed[148:156] = f"{sum(fixed):06o}\0 ".encode()
    _refused(archive, good[:start] + bytes(fixed) + good[start + 512 :], tmp_path)


def with_file(good: bytes, name: str, content: bytes, size: int | None = None) -> bytes:
    """An archive with one more file, right in all else.

    Args:
        size: what its list says; None what is right.
    """
    entry = tarfile.TarInfo.frombuf(good[:512], "utf-8", "strict")
    listed = json.loads(good[512 : 512 + entry.size])
    listed["files"][name] = {
        "size": len(content) if size is None else size,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    rest = good[512 + entry.size + -entry.size % 512 : -1024]
    head = json.dumps(listed).encode()
    entry.size = len(head)
    added = tarfile.TarInfo(name)
    added.size = len(content)
    parts = (
        entry.tobuf(tarfile.GNU_FORMAT), head, bytes(-len(head) % 512), rest, added.tobuf(tarfile.GNU_FORMAT), content,
        bytes(-len(content) % 512), bytes(1024),
    )  # fmt: skip
    return b"".join(parts)


@pytest.mark.parametrize("name", ["../x", ".mdi", "a/b", "gguf.json", "parts.json"])
def test_archives_with_a_file_elsewhere_or_one_that_is_made_here(archive: Path, tmp_path: Path, name: str) -> None:
    _refused(archive, with_file(archive.read_bytes(), name, b""), tmp_path)
    assert not list(tmp_path.rglob("x"))


@pytest.mark.parametrize("size", [0, 3, 5, 513])
def test_a_file_of_another_size_than_the_list_says(archive: Path, tmp_path: Path, size: int) -> None:
    _refused(archive, with_file(archive.read_bytes(), "more", b"four", size), tmp_path)
    archive.write_bytes(with_file((tmp_path / "good.mdi").read_bytes(), "more", b"four"))


def test_an_archive_without_all_of_its_weights(store: ModelStore, tmp_path: Path) -> None:
    """Of a folder in Hugging Face's form, with one of two files."""
    folder, _ = tiny_hf(store.folder / "org" / "two")
    weights = folder / "model.safetensors"
    weights.rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    made = StoredModel("org/two", folder, store.folder)
    export_model(made, tmp_path / "two.mdi")
    _refused(tmp_path / "two.mdi", (tmp_path / "two.mdi").read_bytes(), tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no such files")
def test_what_is_no_file_is_not_imported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "waits")
    for path in (tmp_path / "waits", tmp_path):
        with pytest.raises(StoreError, check=lambda e: e.code == "archive"):
            import_model(ModelStore(tmp_path / "target"), path)


@pytest.mark.parametrize("place", ["absolute", "above"])
def test_a_copied_folder_names_no_file_outside(store: ModelStore, gguf: Path, place: str) -> None:
    copied = store.folder / "org" / "name"
    shutil.copytree(gguf_directory(gguf, store.folder), copied)
    named = gguf if place == "absolute" else Path(os.path.relpath(gguf, copied))
    (copied / "gguf.json").write_text(json.dumps({"file": str(named)}))
    assert gguf_file(copied) is None
    with pytest.raises(CheckpointError, match=re.escape(f"gguf.json cannot be read: remove {copied}")):
        open_source(copied)
    own = next((store.folder / "gguf").iterdir())
    assert gguf_file(own) == gguf


# Files that are gone


def offered(store: ModelStore) -> list[str]:
    """By a server, beside the model that it was started with."""
    first = embedded_model()
    assert first is not None
    return Catalog(store.folder, first).names()[1:]


def test_a_file_that_is_gone_is_listed_and_not_offered(
    store: ModelStore, gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = gguf_directory(gguf, store.folder)
    (model,) = store.models()
    assert model.folder == folder and offered(store) == [model.name]
    gguf.unlink()
    assert launch("list", []) == 0
    assert f"{model.name} " in (out := capsys.readouterr().out) and "file is gone" in out
    assert not store.models() and not offered(store)
    assert launch("run", [model.name, "a"]) == 2
    assert str(gguf) in (err := capsys.readouterr().err) and f"mdi rm {model.name}" in err
    assert launch("rm", [model.name, "--yes"]) == 0 and not store.all()


def test_a_file_of_the_hubs_cache_that_is_gone(
    store: ModelStore, gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cache's files are links to others."""
    snapshot = store.folder.parent / "cache" / "models--org--linked" / "snapshots" / "one"
    snapshot.mkdir(parents=True)
    (snapshot / "tiny.Q8_0.gguf").symlink_to(gguf)
    assert [model.name for model in store.models()] == ["org/linked:Q8_0"]
    gguf.unlink()
    assert launch("list", []) == 0 and "file is gone" in capsys.readouterr().out
    assert not store.models()


def test_chunks_are_looked_for_in_the_store_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    monkeypatch.setattr("mdi.cli.session.stored_for", lambda path, store: folders.append(store.folder))
    with pytest.raises(UsageError, match="^--chunk checkpoints/org/name/"):
        found_chunk(Path("checkpoints/org/name/chunks/2nodes/model_starter"), tmp_path)
    assert folders == [tmp_path]
