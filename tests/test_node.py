"""The parts of a node: where weights come from, devices and dtypes, local rings, the display, a secondary's life."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mdi.net.link
import mdi.node.worker
import mdi.stages.torch_stage
from mdi.cancel import Cancel
from mdi.checkpoint.chunks import ChunkFile, find_chunk, write_chunks
from mdi.checkpoint.source import open_source
from mdi.control.messages import InitRequest, PartSpec
from mdi.engine.sequence import SamplingParams
from mdi.errors import CheckpointError, Code, ControlError, MdiError, NodeLostError, SplitError, UsageError
from mdi.host.computing import Computing
from mdi.host.device import check_format, choose_device, choose_dtype
from mdi.host.threads import fair_threads
from mdi.kernels import library
from mdi.model.plain import ModelConfig, spec_of
from mdi.net.wire import SILENCE_S
from mdi.node.secondary import SecondaryNode
from mdi.node.worker import Waits
from mdi.run.local import LocalRing, free_ports
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.spec.extent import Extent
from mdi.spec.model_id import ModelId
from mdi.spec.options import StarterOptions
from mdi.stages.starter_weights import StarterWeights
from mdi.stages.store import check_capacity
from mdi.stages.torch_stage import Stage, StarterStage, TorchStage
from tiny_checkpoint import encode, reference, tiny_config, write_checkpoint
from waiting import until

CPU = torch.device("cpu")
library.load()  # as in secondaries.py


@pytest.fixture(scope="module")
def plain_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain") / "tiny")


@pytest.fixture
def chunked(tmp_path: Path) -> Path:
    """A checkpoint with chunks for three nodes, cut 0, 4, 1: not as an even split would."""
    folder = write_checkpoint(tmp_path / "tiny")
    source = open_source(folder)
    write_chunks(source, folder, (0, 4, 1))
    source.close()
    return folder


@contextlib.contextmanager
def weights_of(*args: Any) -> Iterator[StarterWeights]:
    weights = StarterWeights(*args)
    try:
        yield weights
    finally:
        weights.close()


# Weights


def reads_checkpoint(weights: StarterWeights) -> bool:
    return any(not isinstance(source, ChunkFile) for source in weights.sources)


def test_chunks_beside_the_checkpoint_are_used(chunked: Path) -> None:
    with weights_of(chunked, None, 3, None) as weights:
        assert weights.blocks == [(0, 0), (0, 4), (4, 5)]
        assert not reads_checkpoint(weights), "nothing needs to be hashed"
        assert (weights.model.name, weights.model.dtype) == ("tiny-random", "float32")


def test_another_cut_or_count_takes_the_checkpoint(chunked: Path) -> None:
    with weights_of(chunked, None, 3, "1,2,2") as weights:
        assert weights.blocks == [(0, 1), (1, 3), (3, 5)]
    with weights_of(chunked, None, 2, None) as weights:
        assert weights.blocks[0][0] == 0 and weights.blocks[-1][1] == 5 and reads_checkpoint(weights)
    with weights_of(chunked, None, 1, None) as weights:
        assert weights.blocks == [(0, 5)]


@pytest.mark.parametrize("n_newer", [0, 1, 2])
def test_stale_chunks_are_not_used(chunked: Path, n_newer: int) -> None:
    """The weights were written again, by a training that went on, say, and only some of the chunks were made again."""
    now = (chunked / "lit_model.pth").stat().st_mtime + 100
    os.utime(chunked / "lit_model.pth", (now, now))
    for node in ("starter", "secondary0")[:n_newer]:
        os.utime(find_chunk(chunked, 3, node), (now + 1, now + 1))
    with weights_of(chunked, None, 3, None) as weights:
        assert reads_checkpoint(weights) and weights.blocks != [(0, 0), (0, 4), (4, 5)]


def test_a_damaged_chunk_beside_the_checkpoint_is_passed_over(chunked: Path) -> None:
    os.truncate(find_chunk(chunked, 3, "secondary0"), 1000)
    with weights_of(chunked, None, 3, None) as weights:
        assert reads_checkpoint(weights) and len(weights.source_of("block.2").tensors("block.2")) > 5


def test_a_missing_chunk_is_made_up_for_by_the_checkpoint(chunked: Path) -> None:
    find_chunk(chunked, 3, "secondary1").unlink()
    with weights_of(chunked, None, 3, None) as weights:
        assert len(weights.source_of("block.4").tensors("block.4")) > 5


def test_the_starters_chunk_and_its_siblings(chunked: Path, tmp_path: Path) -> None:
    chunk = find_chunk(chunked, 3, "starter")
    with weights_of(None, chunk, 3, None) as weights:
        assert weights.blocks == [(0, 0), (0, 4), (4, 5)]
        assert weights.directory == chunked, "the tokenizer is looked for there"
    # other chunks may hold what a cut by hand needs
    with weights_of(None, chunk, 3, "1,2,2") as weights:
        assert len(weights.source_of("block.0").tensors("block.0")) > 5
    with pytest.raises(UsageError) as e:
        StarterWeights(None, find_chunk(chunked, 3, "secondary0"), 3, None)
    assert "secondary0" in str(e.value) and "model_starter.safetensors" in str(e.value)
    with pytest.raises(UsageError) as e:
        StarterWeights(None, chunk, 2, None)
    assert "over 3 nodes" in str(e.value) and "--n-nodes 2" in str(e.value)
    with pytest.raises(UsageError) as e:
        StarterWeights(None, chunked, 3, None)
    assert str(chunked) in str(e.value)


def test_a_starters_chunk_alone(chunked: Path) -> None:
    for node in ("secondary0", "secondary1"):
        find_chunk(chunked, 3, node).unlink()
    with pytest.raises(CheckpointError) as e:
        StarterWeights(None, find_chunk(chunked, 3, "starter"), 3, "1,2,2")
    assert "block.0" in str(e.value)


def test_a_damaged_part_is_noticed_before_it_is_used(chunked: Path) -> None:
    path = find_chunk(chunked, 3, "starter")
    with open(path, "r+b") as file:
        file.seek(-64, 2)
        file.write(b"\x3f" * 16)
    with weights_of(None, path, 3, None) as weights, pytest.raises(CheckpointError) as e:
        weights.verify(["embedding", "head"], Cancel())
    assert "head" in str(e.value) and e.value.code == "weights"


def test_wrong_requests(chunked: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as e:
        StarterWeights(None, None, 1, None)
    assert "--ckpt" in str(e.value)
    with pytest.raises(CheckpointError) as e:
        StarterWeights(tmp_path / "nowhere", None, 1, None)
    assert str(tmp_path / "nowhere") in str(e.value)
    with pytest.raises(SplitError):
        StarterWeights(chunked, None, 3, "1,1,1")
    with pytest.raises(SplitError):
        StarterWeights(chunked, None, 7, None)


# Devices


def test_choose_device() -> None:
    assert choose_device("cpu") == "cpu"
    found = choose_device(None)
    assert found == choose_device("auto")
    assert found == ("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
    for wrong in ("banana", "xpu", "meta", "cuda:99", "cuda:x", "", "cpu,cpu"):
        if wrong:
            with pytest.raises(UsageError) as e:
                choose_device(wrong)
            assert repr(wrong) in str(e.value) and e.value.code == "usage"


def test_unknown_formats_and_formats_of_other_devices_are_refused() -> None:
    check_format(None, "cuda")
    with pytest.raises(UsageError) as e:
        check_format("int3", "cpu")
    assert "'int3'" in str(e.value) and e.value.code == "usage"
    check_format("int8", "cuda:1")
    for form, device in (("int4", "mps"), ("fp16", "cuda"), ("float32", "cuda:0")):
        with pytest.raises(UsageError) as e:
            check_format(form, device)
        assert form in str(e.value) and e.value.code == "usage"


def test_a_sequence_for_which_a_node_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdi.stages.store.device_free_bytes", lambda device: 1000)
    computing = Computing("cpu", "float32")
    stage = TorchStage(Stage(spec_of(ModelConfig.from_litgpt(tiny_config())), 1, 3), computing, "float32", "float32")
    with pytest.raises(UsageError) as e:
        check_capacity("secondary4", stage, 64, "cpu")
    assert "blocks 1-2 on secondary4" in str(e.value) and e.value.code == "memory"


def test_choose_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, dtype in (
        ("float32", "float32"),
        ("bf16", "bfloat16"),
        ("half", "float16"),
        ("FP16", "float16"),
    ):
        assert choose_dtype(name, "float32", "cpu") == dtype
    for wrong in ("float64", "int8", "banana", "float8"):
        with pytest.raises(UsageError) as e:
            choose_dtype(wrong, "float32", "cpu")
        assert wrong in str(e.value) and e.value.code == "usage"
    for native, expected in ((False, "float32"), (True, "bfloat16")):
        monkeypatch.setattr("mdi.host.device.cpu_multiplies_bfloat16", lambda native=native: native)
        assert choose_dtype(None, "bfloat16", "cpu") == expected
        assert choose_dtype("auto", "float16", "cpu") == "float32", "which is emulated on most CPUs"
        assert choose_dtype(None, "float32", "cpu") == "float32", "nothing is lost without being asked for"


# Local rings


@pytest.mark.parametrize(
    ("n_nodes", "devices", "n_threads", "words"),
    [
        (0, None, None, "--nodes"),
        (-1, None, None, "--nodes"),
        (2, "cpu", None, "1 devices for 2"),
        (2, None, 0, "--threads"),
        (2, "cpu,", None, "--devices 'cpu,': entry 2 is empty; name a device for each of the 2 nodes"),
        (1, "", None, "entry 1 is empty"),
        (3, "cpu, ,cpu", None, "entry 2 is empty"),
    ],
)
def test_local_ring_arguments(n_nodes: int, devices: str | None, n_threads: int | None, words: str) -> None:
    with pytest.raises(UsageError) as e:
        LocalRing(n_nodes, devices, n_threads, None, False, False)
    assert words in str(e.value) and e.value.code == "usage"


def test_local_ring_of_one_node() -> None:
    with LocalRing(1, "cpu", None, None, False, False) as ring:
        assert ring.cluster.n_nodes == 1 and ring.cluster.starter.device == "cpu"
        assert ring.threads_of_starter == fair_threads([])
        ring.check()


def test_local_ring_tells_of_a_child_that_ended() -> None:
    class Ending(LocalRing):
        def spawn(self, nodes: Path, index: int) -> subprocess.Popen[bytes]:
            return subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"], stdin=subprocess.PIPE)

    with Ending(2, None, 1, None, False, False) as ring:
        ring.children[0].wait(60)
        with pytest.raises(NodeLostError) as e:
            ring.check()
        assert "status 3" in str(e.value)
        ring.check()  # it is told once: the run may go on without it


@pytest.mark.skipif(os.name != "posix", reason="no such signals elsewhere")
def test_local_ring_kills_what_does_not_listen() -> None:
    """A child that is stopped, or stuck in a driver, hears no SIGTERM."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"

    class Deaf(LocalRing):
        def spawn(self, nodes: Path, index: int) -> subprocess.Popen[bytes]:
            child = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert child.stdout is not None and child.stdout.readline()
            child.stdout.close()
            return child

    with Deaf(3, None, 1, None, False, False, end_s=1.0) as ring:
        children = list(ring.children)
    assert [child.returncode for child in children] == [-9, -9]


def test_local_ring_divides_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdi.host.threads.usable_cores", lambda: 7.0)
    assert LocalRing(3, None, None, None, False, False).threads_of_starter == 2
    assert LocalRing(9, None, None, None, False, False).threads_of_starter == 1
    assert LocalRing(3, None, 5, None, False, False).threads_of_starter == 5


def test_free_ports() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


# A secondary's life, in this process


Ring = Callable[..., tuple[Run, SecondaryNode]]


@pytest.fixture
def ring(tmp_path: Path, plain_checkpoint: Path) -> Iterator[Ring]:
    """A starter and a secondary whose work is done by a thread."""
    with contextlib.ExitStack() as stack:
        secondaries: list[SecondaryNode] = []

        def make(silence_s: float = SILENCE_S, port_in: int | None = None) -> tuple[Run, SecondaryNode]:
            if not secondaries:
                node = SecondaryNode(NodeConfig("secondary0", "127.0.0.1", 0, 0), None, tmp_path / "cache")
                node.open()
                thread = threading.Thread(target=node.run, name="secondary0")
                thread.start()
                stack.callback(thread.join, 30)
                stack.callback(node.close)
                secondaries.append(node)
            node = secondaries[0]
            cluster = ClusterConfig(
                NodeConfig("starter", "127.0.0.1", 0, 0),
                (NodeConfig("secondary0", "127.0.0.1", node.control_port, port_in or node.ring_port),),
            )
            options = StarterOptions(
                ckpt=plain_checkpoint,
                prompt_style="none",
                device="cpu",
                silence_s=silence_s,
                fixed=True,
                placement="even",
            )
            starter = Run(GivenNodes(cluster), options, 60)
            stack.callback(starter.close)
            return starter, node

        yield make


def generate(starter: Run, n_tokens: int = 6) -> list[int]:
    starter.open()
    sample = starter.submit("The ring", encode("The ring"), SamplingParams(n_tokens, temperature=0))
    starter.read()
    starter.close()
    starter.close()
    return sample.token_ids


def wait_state(node: SecondaryNode, *states: str) -> dict[str, Any]:
    for _ in range(1000):
        status = node.status(None)
        if status["state"] in states and not node.runs.active:
            return status
        threading.Event().wait(0.02)
    raise AssertionError(status)


@pytest.mark.usefixtures("in_torch")
def test_a_slow_stage_is_alive(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that takes several times the silence after which a neighbour is taken for dead."""
    monkeypatch.setattr(mdi.net.link, "PING_INTERVAL_S", 0.1)
    never = threading.Event()
    n_slow = 0

    class SlowStage(Stage):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal n_slow
            if n_slow < 1:
                n_slow += 1
                never.wait(2.5)
            return super().forward(*args, **kwargs)

    monkeypatch.setattr(mdi.stages.torch_stage, "Stage", SlowStage)
    starter, _ = ring(silence_s=0.6)
    assert generate(starter) == list(reference("The ring", 6))
    assert n_slow == 1


@pytest.mark.usefixtures("in_torch")
def test_a_stage_that_fails_is_named_and_the_node_goes_on(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenStage(Stage):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise RuntimeError("out of something")

    monkeypatch.setattr(mdi.stages.torch_stage, "Stage", BrokenStage)
    starter, secondary = ring()
    with pytest.raises(NodeLostError) as raised:
        generate(starter)
    assert "out of something" in str(raised.value)
    assert raised.value.node == "secondary0"
    starter.close()
    status = wait_state(secondary, "IDLE")
    assert "out of something" in status["error"] and status["error_code"] == "failed"
    monkeypatch.undo()
    secondary.stages.drop_unused()
    again, _ = ring()
    assert generate(again) == list(reference("The ring", 6))
    assert wait_state(secondary, "READY")["error"] is None


@pytest.mark.usefixtures("in_torch")
def test_a_stage_that_cannot_be_built_is_told_to_the_starter(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Stage.load

    def load(self: Stage, *args: Any) -> None:
        if not isinstance(self, StarterStage):
            raise MemoryError("no more of it")
        real(self, *args)

    monkeypatch.setattr(Stage, "load", load)
    starter, secondary = ring()
    with pytest.raises(MdiError) as caught:
        generate(starter)
    assert "secondary0" in str(caught.value)
    assert caught.value.code == "memory"
    starter.close()
    assert wait_state(secondary, "IDLE")["error"] == "it ran out of memory"


def test_the_same_starter_is_used_for_several_samples_after_one_another(ring: Ring) -> None:
    """As a chat does."""
    starter, _ = ring()
    starter.open()
    for n_tokens in (3, 5):
        sample = starter.submit("The ring", encode("The ring"), SamplingParams(n_tokens, temperature=0))
        starter.read()
        assert sample.token_ids == list(reference("The ring", n_tokens)) and sample.finish_reason == "length"
    starter.close()


def request(**changes: Any) -> InitRequest:
    fields: dict[str, Any] = {
        "run": "0" * 16, "epoch": "0" * 16, "index": 1, "names": ("starter", "secondary0"), "placement": "p",
        "next_addr": "127.0.0.1", "next_port": 1, "model": ModelId("m", ModelConfig(n_layer=1), "h", "float32"),
        "blocks": (0, 1), "parts": (PartSpec("block.0", "a" * 64, 100),), "extent": Extent(10),
    }  # fmt: skip
    return InitRequest(**{**fields, **changes})


def test_a_busy_node_is_waited_for_whatever_it_says(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    starter, secondary = ring()
    init, n_asked = SecondaryNode.init, 0

    def occupied(self: SecondaryNode, request: InitRequest) -> dict[str, Any]:
        nonlocal n_asked
        n_asked += 1
        if n_asked < 3:
            raise ControlError("besetzt", 409, code=Code.BUSY)
        return init(self, request)

    monkeypatch.setattr(SecondaryNode, "init", occupied)
    assert generate(starter) == list(reference("The ring", 6)) and n_asked == 3


def test_requests_out_of_turn(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    _, secondary = ring()

    def refusal(call: Callable[[], object]) -> tuple[int | None, str]:
        with pytest.raises(ControlError) as caught:
            call()
        return caught.value.status, caught.value.code

    def receive(sha256: str, n_bytes: int) -> Callable[[], object]:
        return lambda: secondary.receive_part("0" * 16, sha256, 0, n_bytes, lambda n: b"")

    assert refusal(lambda: secondary.stop("9" * 16, False)) == (409, "run")
    assert refusal(receive("a" * 64, 100)) == (409, "run")
    secondary.init(request())
    assert refusal(lambda: secondary.init(request(run="1" * 16, epoch="1" * 16, exclusive=True))) == (409, "busy")
    until(lambda: secondary.status("0" * 16)["missing"] is not None)
    assert refusal(receive("b" * 64, 100)) == (409, "control")
    assert refusal(receive("a" * 64, 99)) == (400, "control")
    with pytest.raises(CheckpointError):
        secondary.receive_part("0" * 16, "a" * 64, 0, 100, _pieces(40))
    assert secondary.status("0" * 16)["missing"] == [{"sha256": "a" * 64, "have_bytes": 40}]
    with pytest.raises(CheckpointError):
        secondary.receive_part("0" * 16, "a" * 64, 40, 60, _pieces(60))
    status = wait_state(secondary, "IDLE")
    assert "sha256" in status["error"] and not list(secondary.store.directory.iterdir())


def _pieces(n_bytes: int) -> Callable[[int], bytes]:
    left = [b"x" * n_bytes]
    return lambda n: left.pop() if left else b""


def test_a_starter_that_says_nothing_any_more(ring: Ring) -> None:
    _, secondary = ring()
    secondary.waits = Waits(lease_s=0.3)
    secondary.init(request())
    assert wait_state(secondary, "IDLE")["error_code"] == "run"


def test_a_run_that_is_stopped_before_it_begins(ring: Ring) -> None:
    _, secondary = ring()
    secondary.init(request())
    secondary.stop("0" * 16, False)
    assert "before it began" in wait_state(secondary, "IDLE")["error"]
