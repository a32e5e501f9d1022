"""Downloads with the real huggingface_hub client, from a local server that speaks the hub's protocol."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from hub_server import HubModel, HubServer
from mdi.cancel import Cancel, CancelledError
from mdi.checkpoint.download import MARKER, choose_files, download
from mdi.checkpoint.folder import CHUNKS, checkpoints_in, is_repo_id
from mdi.checkpoint.model_store import is_whole
from mdi.checkpoint.source import open_source
from mdi.cli import launch
from mdi.errors import DownloadError
from mdi.serve.catalog import Catalog
from tiny_models import tiny_hf, tiny_lit


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No token and no settings of whoever runs the tests."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf-cache"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    hf, _ = tiny_hf(tmp_path / "hf", n_shards=2)
    files = _files(hf)
    extra = {
        "pytorch_model.bin": b"the same again",
        "consolidated.safetensors": b"and again",
        "README.md": b"text",
        "modeling.py": b"code",
        "tokenizer_code.py": b"code",
        "onnx/model.safetensors": b"elsewhere",
    }
    lit, _ = tiny_lit(tmp_path / "lit")
    models = {
        "org/plain": HubModel({**files, **extra}, revisions=("main", "v1")),
        "org/gated": HubModel(files, gated=True),
        "org/lit": HubModel({**_files(lit), "model.safetensors": b"not needed"}),
        "org/empty": HubModel({"README.md": b"nothing"}),
    }
    with HubServer(models) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server
    from huggingface_hub import close_session

    close_session()


def test_a_model_arrives(hub: HubServer, tmp_path: Path) -> None:
    directory = download("org/plain", tmp_path / "models", progress=False)
    assert directory == tmp_path / "models" / "org" / "plain"
    files = hub.models["org/plain"].files
    expected = {
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert {p.name for p in directory.iterdir() if p.is_file()} == expected | {MARKER}
    assert all((directory / name).read_bytes() == files[name] for name in expected)


def test_a_proxy_is_used(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's name leads nowhere; only the proxy, which is the same server here, can give its files."""
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("HTTP_PROXY", hub.endpoint)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert (download("org/plain", tmp_path / "models", progress=False) / "config.json").is_file()


def test_a_litgpt_model_arrives(hub: HubServer, tmp_path: Path) -> None:
    directory = download("org/lit", tmp_path, progress=False)
    assert {p.name for p in directory.iterdir() if p.is_file()} == {
        "lit_model.pth", "model_config.yaml", "tokenizer.json", MARKER,
    }  # fmt: skip


def test_nothing_is_fetched_twice(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = download("org/plain", tmp_path, progress=False)
    n_requests = len(hub.requests)
    assert download("org/plain", tmp_path, progress=False) == directory
    assert download("org/plain", tmp_path, revision=hub.models["org/plain"].commit, progress=False) == directory
    assert len(hub.requests) == n_requests
    (directory / "model-00002-of-00002.safetensors").unlink()
    download("org/plain", tmp_path, progress=False)
    gets = [path for method, path, _ in hub.requests[n_requests:] if method == "GET" and "/resolve/" in path]
    assert [Path(path).name for path in gets] == ["model-00002-of-00002.safetensors"]


def test_offline(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = download("org/plain", tmp_path, progress=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    assert download("org/plain", tmp_path, progress=False) == directory
    (directory / MARKER).unlink()
    assert download("org/plain", tmp_path, progress=False) == directory  # by the index
    (directory / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(DownloadError) as caught:
        download("org/plain", tmp_path, progress=False)
    assert caught.value.code == "connection"


def test_a_hub_that_cannot_be_reached_is_one_line_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the library under the hub's client is called: its newest versions have another one."""

    class HTTPError(Exception):
        pass

    class Session:
        def get(self, *args: object, **kwargs: object) -> None:
            raise HTTPError("[Errno -2] Name or service not known")

    Session.__module__ = "nexthttp._client"
    monkeypatch.setitem(sys.modules, "nexthttp", SimpleNamespace(HTTPError=HTTPError))
    monkeypatch.setattr("huggingface_hub.get_session", Session)
    monkeypatch.setattr("huggingface_hub.hf_api.get_session", Session)
    assert launch("run", ["org/absent", "Hello", "--store", str(tmp_path)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "the connection to" in error and "mdi import" in error
    assert "has no model yet" in error, "what is here"


def test_a_file_that_was_cut_off_is_gone_on_with(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 5000)  # else 10 MB go to the disk at once
    model = hub.models["org/plain"]
    name = "model-00001-of-00002.safetensors"
    model.cut_after[name] = 20_000
    with pytest.raises(DownloadError) as caught:
        download("org/plain", tmp_path, progress=False)
    assert caught.value.code == "connection"
    assert not is_whole(tmp_path / "org" / "plain")
    assert not (tmp_path / "org" / "plain" / name).exists()
    model.cut_after.clear()
    hub.requests.clear()
    directory = download("org/plain", tmp_path, progress=False)
    assert (directory / name).read_bytes() == model.files[name]
    ranges = [range_ for method, path, range_ in hub.requests if method == "GET" and path.endswith(name)]
    assert ranges == ["bytes=20000-"]


def test_a_cancelled_download_ends_within_its_file(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 5000)
    model, cancel, has_ended = hub.models["org/plain"], Cancel(), threading.Event()
    name = "model-00001-of-00002.safetensors"

    def cancel_it() -> None:  # the rest follows when nobody waits for it any more
        cancel.cancel()
        assert has_ended.wait(60)

    model.at_half[name] = cancel_it
    with pytest.raises(CancelledError):
        download("org/plain", tmp_path, progress=False, cancel=cancel)
    has_ended.set()
    for thread in threading.enumerate():
        if thread.name.startswith(("download", "ThreadPoolExecutor")):
            thread.join(30)
    assert not (tmp_path / "org" / "plain" / name).exists() and not caplog.records
    model.at_half.clear()
    assert (download("org/plain", tmp_path, progress=False) / name).read_bytes() == model.files[name]


@pytest.mark.parametrize("model", ["plain", "lit"])
def test_whatever_has_arrived_the_rest_follows(hub: HubServer, tmp_path: Path, model: str) -> None:
    """A download may end at any time, and its files come in any order: the index of the shards may be the last one."""
    whole = download(f"org/{model}", tmp_path / "whole", progress=False)
    names = sorted(set(_files(whole)) - {MARKER})
    for kept in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names))):
        directory = tmp_path / "-".join(str(names.index(name)) for name in kept) / "org" / model
        directory.mkdir(parents=True)
        for name in (*kept, MARKER):
            shutil.copyfile(whole / name, directory / name)
        assert not is_whole(directory), kept
        if len(kept) in (1, len(names) - 1):
            assert download(f"org/{model}", directory.parents[1], progress=False) == directory
            assert _files(directory) == _files(whole) and is_whole(directory), kept


def test_shards_name_those_that_are_missing(hub: HubServer, tmp_path: Path) -> None:
    """Of a folder that another program downloads, and without its index."""
    directory = download("org/plain", tmp_path, progress=False)
    for name in (MARKER, "model.safetensors.index.json"):
        (directory / name).unlink()
    assert is_whole(directory) and download("org/plain", tmp_path, progress=False) == directory
    (directory / "model-00001-of-00002.safetensors").unlink()
    assert not is_whole(directory)
    download("org/plain", tmp_path, progress=False)
    assert is_whole(directory) and (directory / "model.safetensors.index.json").is_file()


def test_a_converted_model_needs_its_originals_no_more(hub: HubServer, tmp_path: Path) -> None:
    assert launch("prepare-model", ["org/plain", "--ckpt-folder", str(tmp_path)]) == 0
    directory = tmp_path / "org" / "plain"
    for path in directory.glob("model*.safetensors*"):
        path.unlink()
    shutil.rmtree(directory / CHUNKS, ignore_errors=True)
    n_requests = len(hub.requests)
    assert is_whole(directory) and download("org/plain", tmp_path, progress=False) == directory
    assert len(hub.requests) == n_requests


def test_gated(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadError) as caught:
        download("org/gated", tmp_path, progress=False)
    assert caught.value.code == "gated" and "--hf-token" in str(caught.value)
    with pytest.raises(DownloadError) as caught:
        download("org/gated", tmp_path, token="hf_bad", progress=False)
    assert caught.value.code == "gated" and "--hf-token" not in str(caught.value)
    assert not (tmp_path / "org").exists()


def test_a_token_opens_what_is_gated(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert download("org/gated", tmp_path / "a", token="hf_good", progress=False).is_dir()
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    directory = download("org/gated", tmp_path / "b", progress=False)
    assert "hf_good" not in (directory / MARKER).read_text()


def test_unknown(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadError) as caught:
        download("org/nothing", tmp_path, progress=False)
    assert caught.value.code == "unknown"
    with pytest.raises(DownloadError) as caught:
        download("org/plain", tmp_path, revision="v9", progress=False)
    assert caught.value.code == "revision"
    with pytest.raises(DownloadError) as caught:
        download("org/empty", tmp_path, progress=False)
    assert caught.value.code == "no_files"
    assert not (tmp_path / "org").exists()


def test_another_revision_than_the_one_that_is_there(hub: HubServer, tmp_path: Path) -> None:
    directory = download("org/plain", tmp_path, revision="v1", progress=False)
    assert download("org/plain", tmp_path, progress=False) == directory
    with pytest.raises(DownloadError) as caught:
        download("org/plain", tmp_path, revision="main", progress=False)
    assert caught.value.code == "revision"


def test_no_space(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(DownloadError) as caught:
        download("org/plain", tmp_path, progress=False)
    assert caught.value.code == "disk"
    assert not any("/resolve/" in path for _, path, _ in hub.requests)


@pytest.mark.parametrize("name", ["model", "a/b/c", "../x", "a/..", "/a/b", "a/b c", "", "~/a", "./a"])
def test_what_is_no_name(tmp_path: Path, name: str) -> None:
    assert not is_repo_id(name)
    with pytest.raises(DownloadError) as caught:
        download(name, tmp_path)
    assert caught.value.code == "name"


def test_choose_files() -> None:
    small = ["config.json", "tokenizer.model"]
    other = ["README.md", "x/y.safetensors"]
    for weights in (["model.safetensors"], ["pytorch_model.bin"], ["weights.safetensors"]):
        assert choose_files([*small, *other, *weights]) == sorted([*small, *weights])
    assert "pytorch_model.bin" not in choose_files(["pytorch_model.bin", "model.safetensors"])
    assert choose_files(["a.bin", "training_args.bin"]) == ["a.bin"]


def test_the_command_from_the_hub_to_chunks(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a newcomer would call it: HF_ENDPOINT set, then again without a hub."""
    words = ["org/plain", "--ckpt-folder", str(tmp_path / "m"), "--n-nodes", "2"]
    assert launch("prepare-model", words) == 0
    first = capsys.readouterr().out
    chunk = tmp_path / "m" / "org" / "plain" / "chunks" / "2nodes" / "model_secondary0.safetensors"
    assert str(chunk) in first
    assert load_file(chunk)
    n_requests = len(hub.requests)
    assert launch("prepare-model", words) == 0
    assert capsys.readouterr().out == first
    assert len(hub.requests) == n_requests
    index = json.loads((tmp_path / "m" / "org" / "plain" / MARKER).read_text())
    assert index["commit"] == hub.models["org/plain"].commit


def test_models_are_pulled_listed_and_removed(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server offers by name what was pulled; a second pull fetches nothing, and what is removed is gone from the disk."""
    home = tmp_path / "models"
    folder = ["--ckpt-folder", str(home)]
    for name in ("org/plain", "org/lit"):
        assert launch("pull", [name, *folder]) == 0
    n_requests = len(hub.requests)
    assert launch("pull", ["org/plain", *folder]) == 0
    assert not [path for _, path, _ in hub.requests[n_requests:] if "/resolve/" in path]
    capsys.readouterr()
    assert launch("list", folder) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("org/")]
    assert listed == ["org/lit", "org/plain"] == list(checkpoints_in(home))
    assert Catalog(home, home / "org" / "lit").names() == ["org/lit", "org/plain"]
    source = open_source(home / "org" / "plain")
    source.close()
    assert launch("rm", ["org/plain", "--yes", *folder]) == 0
    assert list(checkpoints_in(home)) == ["org/lit"] and not (home / "org" / "plain").exists()
    assert launch("pull", ["org/plain", *folder]) == 0 and "org/plain" in checkpoints_in(home), "it can be had again"


def test_a_model_that_cannot_be_pulled_is_not_listed(hub: HubServer, tmp_path: Path) -> None:
    folder = ["--ckpt-folder", str(tmp_path / "models")]
    for name in ("org/gated", "org/nothing", "org/empty"):
        assert launch("pull", [name, *folder]) != 0
    assert not checkpoints_in(tmp_path / "models")
