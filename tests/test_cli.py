"""What a wrong command line, file or machine leads to: one clear line on stderr, a status that is not 0, no traceback."""

from __future__ import annotations

import contextlib
import errno
import http.server
import io
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mdi
from mdi.cli import COMMANDS, TERMINATED, Acknowledged, launch, main
from mdi.run.local import free_ports
from tiny_checkpoint import CONTEXT, TEXT, encode, reference, tiny_gpt, write_checkpoint

SRC = Path(__file__).resolve().parents[1] / "src"
LAUNCHERS = sorted(path.name for path in SRC.glob("*.py"))

Failure = Callable[..., str]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ckpt") / "tiny")


@pytest.fixture
def failure(capsys: pytest.CaptureFixture[str]) -> Failure:
    """Run a command that must fail; the line that it prints."""

    def run(command: str, *args: object, status: int | None = None) -> str:
        capsys.readouterr()
        found = launch(command, list(map(str, args)))
        printed = capsys.readouterr()
        lines = [line for line in printed.err.splitlines() if line.startswith("error: ")]
        assert found in ((1, 2) if status is None else (status,)), (found, printed)
        assert len(lines) == 1 and printed.err.splitlines()[-1] == lines[0], printed.err
        assert "Traceback" not in printed.err and "--json" in args or not printed.out, printed
        return lines[0]

    return run


def nodes_file(folder: Path, n_nodes: int = 2, **changes: Any) -> Path:
    ports = iter(free_ports(2 * n_nodes))
    entries: list[dict[str, Any]] = [
        {"addr": "127.0.0.1", "communication": {"port": next(ports)}, "inference": {"port_in": next(ports)}}
        for _ in range(n_nodes)
    ]
    for key, value in changes.items():
        entries[-1][key] = value
    path = folder / "nodes.json"
    path.write_text(json.dumps({"nodes": {"starter": entries[0], "secondary": entries[1:]}}), encoding="utf-8")
    return path


def ports_of(path: Path, node: int) -> tuple[int, int]:
    """Control and ring port of a node; 0 is the starter."""
    nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    entry = [nodes["starter"], *nodes["secondary"]][node]
    return entry["communication"]["port"], entry["inference"]["port_in"]


@contextlib.contextmanager
def taken(port: int) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", port)):
        yield


@contextlib.contextmanager
def web_server(port: int, answer: bytes, status: int = 200) -> Iterator[None]:
    """Somebody else's HTTP server, or a node of another version."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="web-server")
        thread.start()
        yield
        server.shutdown()
        thread.join(10)


# The nodes file


@pytest.mark.parametrize("command", ["starter", "secondary"])
def test_no_nodes_file(failure: Failure, tmp_path: Path, checkpoint: Path, command: str) -> None:
    model = ["--ckpt", checkpoint] if command == "starter" else []
    told = failure(command, *model, "--nodes-config", tmp_path / "no" / "nodes.json", status=2)
    assert str(tmp_path / "no" / "nodes.json") in told and f"nearest that exists is {tmp_path}" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"nodes": ', "not valid JSON"),
        ("[1]", "expected a JSON object, found [1]"),
        ("{}", "'nodes' is missing"),
        ('{"nodes": {"secondary": []}}', "'starter' is missing"),
        ('{"nodes": {"starter": {"addr": "127.0.0.1"}}}', "'communication' is missing"),
        ('{"nodes": {"starter": {"addr": 1, "communication": {"port": 1}, "inference": {"port_in": 2}}}}', "addr"),
        (
            '{"nodes": {"starter": {"addr": "a", "communication": {"port": 99999}, "inference": {"port_in": 2}}}}',
            "65535",
        ),
    ],
)
def test_broken_nodes_file(failure: Failure, tmp_path: Path, checkpoint: Path, text: str, words: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(text, encoding="utf-8")
    told = failure("starter", "--ckpt", checkpoint, "--nodes-config", path, status=2)
    assert str(path) in told and words in told


def test_a_nodes_file_without_end(failure: Failure, checkpoint: Path) -> None:
    assert "/dev/zero" in failure("starter", "--ckpt", checkpoint, "--nodes-config", "/dev/zero", status=2)
    assert "/dev/zero" in failure("plan", "--config", "pythia-14m", "--profiles", "/dev/zero", status=2)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no pinning on this system")
def test_cores_of_the_nodes_file_that_are_not_there(failure: Failure, tmp_path: Path) -> None:
    told = failure("secondary", "--nodes-config", nodes_file(tmp_path, cores=[4095]), "0", status=2)
    assert "4095" in told and "nodes file" in told


def test_too_little_memory_is_not_told_as_damage(
    failure: Failure, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("unable to mmap 1000 bytes from file: Cannot allocate memory (12)")

    with monkeypatch.context() as patch:
        patch.setattr("torch.load", fail)
        assert "damaged" in failure("sample", "--ckpt", checkpoint, status=1)
        patch.setattr("mdi.checkpoint.weightfile.mmap.mmap", refuse)
        told = failure("sample", "--ckpt", checkpoint, status=1)
    assert "memory" in told and "damaged" not in told
    monkeypatch.setattr("mdi.cli.starter.generate", lambda *args: bytes(1 << 62))
    assert launch("sample", ["--ckpt", str(checkpoint)]) == 1
    assert capsys.readouterr().err.startswith("error: out of memory")


@pytest.mark.parametrize("flags", [["5"], ["x"], [], ["0", "1"], ["-1"]])
def test_index_of_a_secondary(failure: Failure, tmp_path: Path, flags: list[str]) -> None:
    path = nodes_file(tmp_path, 3)
    assert "index" in failure("secondary", "--nodes-config", path, *flags, status=2)


# Ports and other nodes


# cheroot leaves a socket that it could not bind to the garbage collector
@pytest.mark.filterwarnings("ignore:unclosed <socket.socket:ResourceWarning")
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("command", ["starter", "secondary"])
def test_port_in_use(failure: Failure, tmp_path: Path, checkpoint: Path, command: str, which: int) -> None:
    path = nodes_file(tmp_path)
    port = ports_of(path, 0 if command == "starter" else 1)[which]
    model = ["--ckpt", checkpoint] if command == "starter" else ["--cache-dir", tmp_path / "cache"]
    with taken(port):
        told = failure(command, *model, "--nodes-config", path, *([] if command == "starter" else ["0"]), status=2)
    assert f"127.0.0.1:{port}" in told


def test_address_of_another_machine(failure: Failure, tmp_path: Path) -> None:
    path = nodes_file(tmp_path, addr="192.0.2.1")
    told = failure("secondary", "--nodes-config", path, "0", "--insecure", "--cache-dir", tmp_path / "cache", status=2)
    assert "192.0.2.1" in told and "bind" in told


def test_secondary_is_not_there(failure: Failure, tmp_path: Path, checkpoint: Path) -> None:
    path = nodes_file(tmp_path)
    told = failure("starter", "--ckpt", checkpoint, "--nodes-config", path, "--wait", 1, status=1)
    assert "secondary0" in told and f"127.0.0.1:{ports_of(path, 1)[0]}" in told and "mdi secondary" in told


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (b'{"state": "IDLE", "control_version": 99, "version": "9.0"}', 200, "version 9.0"),
        (b"<html>a printer</html>", 200, "not a node of MDI-LLM"),
        (b'{"hello": 1}', 200, "not a node of MDI-LLM"),
        (b'{"error": "go away"}', 403, "go away"),
    ],
)
def test_somebody_else_at_the_port(
    failure: Failure, tmp_path: Path, checkpoint: Path, answer: bytes, status: int, words: str
) -> None:
    path = nodes_file(tmp_path)
    with web_server(ports_of(path, 1)[0], answer, status):
        told = failure("starter", "--ckpt", checkpoint, "--nodes-config", path, "--wait", 1, status=1)
    assert "secondary0" in told and words in told


# The model


def test_no_checkpoint(failure: Failure, tmp_path: Path) -> None:
    told = failure("sample", "--ckpt", tmp_path / "org" / "model", status=2)
    assert str(tmp_path / "org" / "model") in told


def test_a_wrong_checkpoint_is_told_with_those_that_there_are(
    failure: Failure, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "checkpoints"
    for name in ("org/first", "second"):
        shutil.copytree(checkpoint, home / name)
    monkeypatch.setenv("MDI_STORE", str(home))
    told = failure("sample", "--ckpt", "org/model", status=2)
    assert f"{home} has {Path('org', 'first')}, second" in told
    assert launch("sample", ["--ckpt", "org/first", "--n-tokens", "1", "--json"]) == 0, "it is looked for there as well"
    assert str(home) in failure("plan", "--profiles", tmp_path / "x", "--ckpt", "org/model", status=2)
    assert "is a file" in failure("chat", "--ckpt", checkpoint / "lit_model.pth", status=2)


def test_an_empty_checkpoints_folder(failure: Failure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDI_STORE", str(tmp_path / "none"))
    assert "mdi prepare-model" in failure("sample", "--ckpt", "org/model", status=2)


@pytest.mark.parametrize(
    "flags",
    [
        ["/tmp"],
        ["CKPT", "--n-nodes", "9"],
        ["CKPT", "--n-nodes", "0"],
        ["CKPT", "--layers", "1,2,3"],
        ["no/such/model/"],
    ],
)
def test_a_model_that_cannot_be_prepared(failure: Failure, checkpoint: Path, tmp_path: Path, flags: list[str]) -> None:
    given = {"CKPT": str(checkpoint), "/tmp": str(tmp_path)}
    failure("prepare-model", *(given.get(flag, flag) for flag in flags), status=2)
    assert not (checkpoint / "chunks").exists()


def test_wrong_flags_are_told_before_torch_is_imported(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MDI_STORE", str(tmp_path / "store"))  # in which no model was used
    nodes = str(nodes_file(tmp_path, 7))
    ckpt = ["--ckpt", str(checkpoint)]
    cases = [
        ("starter", ["--ckpt", "nowhere"]),
        ("starter", [*ckpt, "--nodes-config", nodes]),
        ("starter", [*ckpt, "--nodes-config", nodes, "--layers", "1"]),
        ("starter", ["--chunk", "nowhere.safetensors", "--nodes-config", nodes]),
        ("secondary", ["--chunk", "nowhere.safetensors", "--nodes-config", nodes, "0"]),
        ("secondary", ["--ckpt", "nowhere", "--nodes-config", nodes, "0"]),
        ("local-ring", [*ckpt, "--nodes", "8"]),
        ("local-ring", [*ckpt, "--nodes", "2", "--layers", "1,2,2"]),
        ("local-ring", [*ckpt, "--nodes", "8", "--parallel", "tensor", "--layers", "1,4"]),
        ("prepare-model", [str(checkpoint), "--n-nodes", "9"]),
        ("prepare-model", [str(tmp_path)]),
        ("sample", []),
        ("sample", [*ckpt, "--quantize", "int5"]),
        ("sample", [*ckpt, "--dtype", "float8"]),
        ("sample", [*ckpt, "--device", "banana"]),
        ("sample", [*ckpt, "--prompt", "FILE:nowhere.txt"]),
        ("chat", ["--ckpt", "nowhere"]),
        ("plan", ["--ckpt", "nowhere", "--nodes-config", nodes]),
        ("doctor", ["--ckpt", "nowhere", "--nodes-config", nodes]),
    ]
    code = (
        "import json, sys\nfrom mdi.cli import launch\n"
        "for command, argv in json.loads(sys.argv[1]):\n"
        "    assert launch(command, argv) == 2, (command, argv)\n"
        "    assert 'torch' not in sys.modules, (command, argv)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(cases)], cwd=SRC, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == len(cases) and "Traceback" not in done.stderr


def test_no_model_is_named(failure: Failure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDI_STORE", str(tmp_path / "store"))
    assert "--ckpt" in failure("sample", status=2)


def test_chunk_that_is_not_there(failure: Failure, tmp_path: Path) -> None:
    told = failure(
        "starter",
        "--chunk",
        tmp_path / "no" / "model_starter.safetensors",
        "--nodes-config",
        nodes_file(tmp_path),
        status=2,
    )
    assert "model_starter.safetensors" in told


def test_folder_without_weights(failure: Failure, tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "half"
    shutil.copytree(checkpoint, folder)
    (folder / "lit_model.pth").unlink()
    assert "lit_model.pth" in failure("sample", "--ckpt", folder, status=2)


def test_folder_without_tokenizer(failure: Failure, tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "half"
    shutil.copytree(checkpoint, folder)
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in failure("sample", "--ckpt", folder)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_checkpoint_cut_short(failure: Failure, tmp_path: Path, checkpoint: Path, part: float) -> None:
    folder = tmp_path / "short"
    shutil.copytree(checkpoint, folder)
    weights = folder / "lit_model.pth"
    os.truncate(weights, int(weights.stat().st_size * part))
    told = failure("sample", "--ckpt", folder, status=1)
    assert str(weights) in told


def test_tensor_of_a_wrong_shape(failure: Failure, tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "wrong"
    shutil.copytree(checkpoint, folder)
    state = {**tiny_gpt().state_dict(), "transformer.h.2.norm_1.weight": torch.ones(47)}
    torch.save(state, folder / "lit_model.pth")
    told = failure("sample", "--ckpt", folder, status=1)
    assert "transformer.h.2.norm_1.weight" in told and "47" in told and "48" in told


@pytest.mark.parametrize("name", ["transformer.h.4.mlp.fc_1.weight", "lm_head.weight", "transformer.ln_f.weight"])
def test_tensor_that_is_missing(failure: Failure, tmp_path: Path, checkpoint: Path, name: str) -> None:
    folder = tmp_path / "wrong"
    shutil.copytree(checkpoint, folder)
    torch.save({k: v for k, v in tiny_gpt().state_dict().items() if k != name}, folder / "lit_model.pth")
    if name == "lm_head.weight":  # may be tied to the embedding: then the one stands in for the other
        assert launch("sample", ["--ckpt", str(folder), "--n-tokens", "1", "--json"]) == 0
        return
    assert name in failure("sample", "--ckpt", folder, status=1)


def test_code_in_a_checkpoint_is_not_run(failure: Failure, tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "evil"
    shutil.copytree(checkpoint, folder)
    trap = tmp_path / "trap"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(trap),)

    torch.save({"lm_head.weight": Evil()}, folder / "lit_model.pth")
    assert str(folder / "lit_model.pth") in failure("sample", "--ckpt", folder, status=1)
    assert not trap.exists()


@pytest.mark.parametrize("text", ["", "- 1\n", "n_layer: {", "n_layer: five\n", "no_such_field: 1\n"])
def test_broken_model_config(failure: Failure, tmp_path: Path, checkpoint: Path, text: str) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint, folder)
    (folder / "model_config.yaml").write_text(text, encoding="utf-8")
    assert "model_config.yaml" in failure("sample", "--ckpt", folder, status=1)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("2,2", "5"),
        ("5,0", "secondary0"),
        ("-1,6", "-1"),
        ("1,2,2", "2 nodes"),
        ("a,b", "starter first"),
        ("", "starter first"),
    ],
)
def test_split_that_does_not_add_up(
    failure: Failure, tmp_path: Path, checkpoint: Path, layers: str, words: str
) -> None:
    told = failure(
        "starter", "--ckpt", checkpoint, "--nodes-config", nodes_file(tmp_path), f"--layers={layers}", status=2
    )
    assert f"layers {layers!r}" in told and words in told


def test_more_nodes_than_blocks(failure: Failure, tmp_path: Path, checkpoint: Path) -> None:
    told = failure("starter", "--ckpt", checkpoint, "--nodes-config", nodes_file(tmp_path, 7), status=2)
    assert "not for 7" in told


# What to generate, and on what


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", "-0.5"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "0"], "top-p"),
        (["--top-p", "1.5"], "top-p"),
        (["--top-k", "-3"], "top-k"),
        (["--n-tokens", "0"], "new tokens"),
        (["--n-tokens", "-1"], "new tokens"),
        (["--n-samples", "0"], "samples"),
        (["--sequence-length", "0"], "error: --sequence-length"),
        (["--sequence-length", "-3"], "error: --sequence-length"),
        (["--sequence-length", str(CONTEXT + 1)], str(CONTEXT)),
        (["--prompt", "FILE:/dev/zero"], "/dev/zero"),
        (["--prompt", ""], "empty"),
        (["--prompt", "FILE:"], "FILE:"),
        (["--prompt", "FILE:no/such/prompts.txt"], "no/such/prompts.txt"),
        (["--prompt", TEXT * 10], "context"),
        (["--prompt", TEXT, "--sequence-length", "8"], "context holds 8"),
        (["--stop", ""], "--stop"),
        (["--prompt-style", "telegram"], "telegram"),
        (["--dtype", "float8"], "float8"),
        (["--dtype", "int"], "int"),
        (["--device", "banana"], "banana"),
        (["--device", "xpu"], "xpu"),
        (["--device", "meta"], "meta"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--threads", "0"], "--threads"),
        (["--seed", "99999999999999999999999999"], "seed"),
    ],
)
def test_bad_flags(failure: Failure, checkpoint: Path, flags: list[str], words: str) -> None:
    if "--seed" in flags:  # any whole number will do
        assert launch("sample", ["--ckpt", str(checkpoint), "--n-tokens", "1", "--json", *flags]) == 0
        return
    assert words in failure("sample", "--ckpt", checkpoint, *flags, status=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test does without")
def test_no_gpu(failure: Failure, checkpoint: Path, tmp_path: Path) -> None:
    assert "0 CUDA devices" in failure("sample", "--ckpt", checkpoint, "--device", "cuda", status=2)
    path = nodes_file(tmp_path, device="cuda")
    assert "'cuda'" in failure("secondary", "--nodes-config", path, "0", status=2)


def test_each_prompt_gets_a_sample(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--ckpt", str(checkpoint), "--prompt", "Who", "--prompt", "The ring", "--n-tokens", "2", "--json"]
    for flags, expected in (([], ["Who", "The ring"]), (["--n-samples", "3"], ["Who", "The ring", "Who"])):
        assert launch("sample", [*argv, *flags]) == 0
        printed = capsys.readouterr()
        assert [sample["prompt"] for sample in json.loads(printed.out)["samples"]] == expected
        assert "left out" not in printed.err


def test_empty_prompt_file(failure: Failure, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(" \n\n", encoding="utf-8")
    assert str(path) in failure("sample", "--ckpt", checkpoint, "--prompt", f"FILE:{path}", status=2)


def test_the_prompt_alone_must_fit(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sample that fills its context ends there, though it was to have more tokens."""
    n_prompt = len(encode("The ring"))
    argv = [
        "--ckpt",
        str(checkpoint),
        "--prompt",
        "The ring",
        "--sequence-length",
        str(n_prompt + 3),
        "--n-samples",
        "1",
    ]
    assert launch("sample", [*argv, "--temperature", "0", "--n-tokens", "9", "--json"]) == 0
    sample = json.loads(capsys.readouterr().out)["samples"][0]
    assert sample["token_ids"] == list(reference("The ring", 3)) and sample["finish_reason"] == "length"


def test_failure_is_one_object_with_json(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        ["--prompt", ""],
        ["--device", "banana"],
        ["--nodes-config", str(tmp_path / "none.json")],
        ["--nodes-config", str(nodes_file(tmp_path)), "--wait", "0.5"],
    ]
    alone = tmp_path / "alone"
    alone.mkdir()
    for flags in cases:
        argv = ["--ckpt", str(checkpoint), "--json", *flags]
        if "--nodes-config" not in argv:
            argv += ["--nodes-config", str(nodes_file(alone, 1))]
        assert launch("starter", argv) in (1, 2)
        printed = capsys.readouterr()
        told = json.loads(printed.out)
        assert set(told) == {"error", "samples"} and told["samples"] == [] and printed.out.count("\n") == 1
        assert f"error: {told['error']}" in printed.err


def test_time_run_file_that_cannot_be_written(
    failure: Failure, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = launch(
        "sample", ["--ckpt", str(checkpoint), "--n-tokens", "1", "--time-run", str(tmp_path / "no" / "runs.csv")]
    )
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert status == 0 or "runs.csv" in printed.err


def test_a_local_ring_compares_itself_with_one_node(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--nodes", "1", "--ckpt", str(checkpoint), "--n-samples", "2", "--n-tokens", "5", "--compare"]
    assert launch("local-ring", argv) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    begin = lines.index(next(line for line in lines if line.startswith("1 node:")))
    ring, alone, gain = lines[begin : begin + 3]
    assert ring.startswith("1 node:") and alone.startswith("1 node:") and "token for token" in alone and gain
    assert printed.err.count("--seed") == 1, "one seed for both"
    assert launch("local-ring", [*argv, "--json"]) == 2


@pytest.mark.parametrize(
    ("status", "late"), [("0", "late"), ("1", "late"), ("130", ""), ("143", ""), ("mdi.cli.Acknowledged(0)", "")]
)
def test_an_interrupted_process_ends_at_once(status: str, late: str) -> None:
    """Without what the interpreter does at its end, which takes seconds once torch is loaded; but nothing printed is lost."""
    code = f"import atexit, mdi.cli; atexit.register(print, 'late', end=''); print('said', end=''); mdi.cli.leave({status})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=SRC)
    expected = 0 if "Acknowledged" in status else int(status)
    assert (done.returncode, done.stdout, done.stderr) == (expected, "said" + late, "")


def test_a_server_that_a_signal_ends_goes_at_once_with_status_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its end is as good as any; but with torch loaded, the interpreter's own would take seconds."""

    class Interrupted:
        def __init__(self, *args: object) -> None: ...

        @property
        def url(self) -> str:
            raise KeyboardInterrupt

        def close(self) -> None: ...

    monkeypatch.setattr("mdi.serve.process.ApiProcess", Interrupted)
    status = launch("serve", ["--ckpt", str(SRC.parent / "assets" / "nano-llama")])
    assert status == 0 and isinstance(status, Acknowledged) and "the server has ended" in capsys.readouterr().err


def test_the_seed_is_new_each_time_and_told(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*flags: str) -> tuple[int, list[int], str]:
        assert launch("sample", ["--ckpt", str(checkpoint), "--n-tokens", "12", "--json", *flags]) == 0
        printed = capsys.readouterr()
        found = json.loads(printed.out)
        return found["seed"], found["samples"][0]["token_ids"], printed.err

    (seed, ids, told), (other_seed, other_ids, _) = run(), run()
    assert seed != other_seed and ids != other_ids
    assert f"--seed {seed}" in told
    assert run("--seed", str(seed))[:2] == (seed, ids), "what is told gives the same text again"
    assert "--seed" not in run("--temperature", "0")[2], "where nothing is drawn it says nothing"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_terminal_that_cannot_show_everything(
    checkpoint: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a random model writes is not ASCII; what goes to a program is whole nevertheless."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    argv = ["--ckpt", str(checkpoint), "--prompt", "Who are you?", "--temperature", "0", "--n-tokens", "12"]
    assert launch("sample", [*argv, *flags]) == 0
    shown = out.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    if flags:
        assert "\ufffd" in json.loads(shown)["samples"][0]["text"]
    else:
        assert "?" in shown


def test_chunk_and_checkpoint_exclude_each_other(checkpoint: Path) -> None:
    with pytest.raises(SystemExit) as e:
        launch("secondary", ["--chunk", "a", "--ckpt", str(checkpoint)])
    assert e.value.code == 2


# Secondaries


def test_secondary_with_files_that_are_not_there(failure: Failure, tmp_path: Path) -> None:
    path = nodes_file(tmp_path)
    for flag, name in (("--chunk", "model_secondary0.safetensors"), ("--ckpt", "model")):
        told = failure("secondary", "--nodes-config", path, "0", flag, tmp_path / "no" / name, status=2)
        assert name in told


def test_secondary_with_a_chunk_that_counts_from_zero(failure: Failure, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model_secondary0.safetensors"
    save_file({"transformer.h.0.norm_1.weight": torch.ones(48)}, path)
    told = failure("secondary", "--nodes-config", nodes_file(tmp_path), "0", "--chunk", path, status=1)
    assert str(path) in told and "mdi prepare-model" in told
    old = tmp_path / "old.pth"
    torch.save({"transformer.h.0.norm_1.weight": torch.ones(48)}, old)
    told = failure("secondary", "--nodes-config", nodes_file(tmp_path), "0", "--chunk", old, status=1)
    assert str(old) in told and "mdi prepare-model" in told


# Local rings


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nodes", "0"], "--nodes"),
        (["--nodes", "2", "--devices", "cpu"], "1 devices for 2 nodes"),
        (["--nodes", "2", "--threads", "0"], "--threads"),
        (["--nodes", "1", "--device", "banana"], "banana"),
        (["--nodes", "8"], "5 blocks"),
        (["--nodes", "2", "--layers", "2,2"], "layers '2,2'"),
    ],
)
def test_local_ring_flags(failure: Failure, checkpoint: Path, flags: list[str], words: str) -> None:
    assert words in failure("local-ring", "--ckpt", checkpoint, *flags, status=2)


def test_a_local_ring_keeps_no_weights_that_were_sent(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        launch("local-ring", ["--cache-dir", "x"])
    assert e.value.code == 2
    assert "unrecognized arguments: --cache-dir" in capsys.readouterr().err


# The commands themselves


def test_debug_log(
    failure: Failure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With -d a failure shows where it came from, and there is a log; without, neither."""
    monkeypatch.setattr("mdi.cli.output_dir", lambda kind: tmp_path / kind)
    failure("sample", "--ckpt", tmp_path / "none")
    assert not (tmp_path / "logs").exists()
    assert launch("sample", ["--ckpt", str(tmp_path / "none"), "-d"]) == 2
    assert "Traceback" in capsys.readouterr().err
    (log,) = (tmp_path / "logs").iterdir()
    assert log.name.startswith("logs_sample_") and "Traceback" in log.read_text(encoding="utf-8")
    assert not logging.getLogger("mdi").handlers and logging.getLogger("mdi").propagate


def test_console_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)
    with pytest.raises(SystemExit) as e:
        main(["dance"])
    assert e.value.code == 2
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        main(["strater"])
    assert e.value.code == 2
    told = capsys.readouterr().err
    assert "mdi starter" in told and told.count("\n") == 1 and len(told) < 200, "not the list of all commands"
    assert main([]) == 2
    assert "several machines:" in capsys.readouterr().out
    with pytest.raises(SystemExit) as e:
        main(["starter", "--version"])
    assert e.value.code == 0
    assert mdi.__version__ in capsys.readouterr().out


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        launch(command, ["--help"])
    assert e.value.code == 0
    shown = capsys.readouterr().out
    assert "example" in shown and "--verb" in shown and len(shown) > 500


@pytest.mark.skipif(os.name != "posix", reason="other systems have no /dev/null")
def test_a_home_that_cannot_be_written_is_no_matter_without_figures() -> None:
    """Libraries import matplotlib, which warns of it."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (requirements.txt)")
    code = "from mdi.cli import launch\nlaunch('list', [])\nimport matplotlib\nmatplotlib.get_cachedir()"
    env = {**os.environ, "HOME": "/dev/null", "PYTHONPATH": str(SRC)}
    for name in ("MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        env.pop(name, None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "atplotlib" not in done.stderr, done.stderr


@pytest.mark.skipif(os.name != "posix", reason="other systems have no such bit")
@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_are_executable(name: str) -> None:
    path = SRC / name
    assert os.access(path, os.X_OK) and path.read_text(encoding="utf-8").startswith("#!/usr/bin/env python3\n")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_missing_libraries_are_told_in_one_line(name: str, tmp_path: Path) -> None:
    """-S leaves out site-packages; with the standard library alone `--help` works, and a run says what to install."""
    bare = [sys.executable, "-S", "-E", str(SRC / name)]
    shown = subprocess.run([*bare, "--help"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0 and "usage:" in shown.stdout, shown.stderr
    path = nodes_file(tmp_path, 1)
    text, model = tmp_path / "text.txt", tmp_path / "model"
    text.write_text("words", encoding="utf-8")
    model.mkdir()
    for file in ("config.json", "model_config.yaml", "lit_model.pth"):
        (model / file).touch()
    (tmp_path / "tokens_time_samples_1nodes_m_1samples.csv").write_text("0.0,0\n1.0,3\n", encoding="utf-8")
    args = {
        "mem_monitor.py": ["-o", tmp_path / "memory.csv", "true"],
        "starter.py": ["--ckpt", model, "--nodes-config", path],
        "secondary.py": ["--nodes-config", nodes_file(tmp_path, 2), "0"],
        "plan.py": ["--config", "x", "--nodes-config", path],
        "plot_tok_time.py": ["m", "--csv", tmp_path / "tokens_time_samples_1nodes_m_1samples.csv", "--label", "1 node"],
        "prepare_data.py": [text, "--vocab-size", "300"],
        "prepare_model.py": [model],
        "train.py": ["--ckpt", tmp_path, "--dataset", tmp_path],
    }.get(name, ["--ckpt", model])
    done = subprocess.run([*bare, *map(str, args)], capture_output=True, text=True, timeout=60)
    # matplotlib is optional: a figure that cannot be drawn was asked for, and the message names just what is missing.
    status, remedy = (2, "pip install matplotlib") if name == "plot_tok_time.py" else (1, "requirements.txt")
    assert done.returncode == status, done
    assert "Traceback" not in done.stderr, done.stderr
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("error: ") and "not installed" in lines[-1] and remedy in lines[-1], lines


def test_what_nobody_foresaw_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> int:
        raise RuntimeError("out of memory\nand many more lines")

    monkeypatch.setattr("mdi.cli.starter.generate", fail)
    assert launch("sample", ["--ckpt", "nowhere", "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == "error: RuntimeError: out of memory (-d shows where)\n"
    assert json.loads(out)["samples"] == []


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("is_first", [True, False])
def test_sigterm_while_handlers_are_set_ends_a_command(monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    """It comes as soon as its handler is there, or when the command is over and the handler about to go."""
    set_handler, before = signal.signal, [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def set_and_send(number: int, handler: Any) -> Any:
        if number == signal.SIGTERM and callable(handler) == is_first and not sent:
            sent.append(number)
            if not is_first:
                os.kill(os.getpid(), number)
            found = set_handler(number, handler)
            if is_first:
                os.kill(os.getpid(), number)
            return found
        return set_handler(number, handler)

    sent: list[int] = []
    monkeypatch.setattr(signal, "signal", set_and_send)
    try:
        assert launch("list", []) == TERMINATED
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            set_handler(number, handler)
    assert sent


@pytest.mark.parametrize(
    ("command", "argv"),
    [("starter", ["--n-tokens", "abc"]), ("serve", ["--keep-alive", "long"]), ("prepare-model", []), ("chat", ["--nope"])],
)  # fmt: skip
def test_wrong_arguments_are_told_in_one_line(
    command: str, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        launch(command, argv)
    told = capsys.readouterr().err
    assert caught.value.code == 2 and told.startswith("error: ") and told.count("\n") == 1
