"""What only a GPU does: stages, frames, packed weights and measurements on CUDA. Skipped where there is none,
as on every machine so far: not one of these tests has ever run (docs/usage.md)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from families import FAMILIES, config_of, greedy, model_of, prompt
from mdi.checkpoint.packing import Packing, plain
from mdi.checkpoint.parts import stage_parts
from mdi.engine.rows import pinned_buffer, receive_buffers
from mdi.host.computing import choose_computing
from mdi.host.device import choose_device, choose_dtype, devices
from mdi.host.resources import device_free_bytes, machine_free_bytes
from mdi.kernels.layout import codes_of, pack
from mdi.kernels.slices import Slice
from mdi.model.plain import ModelConfig, spec_of
from mdi.placement.profiler import Profiler
from mdi.placement.profiling import Subject, reader
from mdi.spec.options import Requested
from mdi.stages.torch_packed import DeviceLinear
from mdi.stages.torch_stage import Stage, StarterStage
from secondaries import cluster_of, secondaries, text_of
from tensor_frames import frame_of, rows_of
from test_own_families import FAMILIES as OWN_FAMILIES
from test_own_families import expected, ids_of, made
from test_packed_linear import weights_of
from test_training_processes import torchrun
from tiny_checkpoint import reference, write_checkpoint
from tiny_training import argv_of, losses, make_dataset, make_shape, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA = torch.device("cuda:0")
SRC = Path(__file__).resolve().parents[1] / "src"
NANO = SRC.parent / "assets" / "nano-llama"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_on_a_gpu_gives_the_tokens_of_the_model(family: str) -> None:
    gpt = model_of(family)
    ids = prompt(20, 1)
    stage = Stage(spec_of(ModelConfig.from_litgpt(gpt.config)), 0, gpt.config.n_layer)
    stage.load_state_dict({k: v for k, v in gpt.state_dict().items() if k.startswith("transformer.h.")}, assign=True)
    stage.to(CUDA).prepare(60, CUDA, torch.float32)
    found: list[int] = []
    for _ in range(8):
        rows = gpt.transformer.wte(torch.tensor([*ids, *found])[-1 if found else 0 :])
        first = len(ids) + len(found) - 1 if found else 0
        x = stage(rows.to(CUDA), [(0, first, len(rows))])[-1:].cpu()
        found.append(int(gpt.lm_head(gpt.transformer.ln_f(x)).argmax()))
    assert found == greedy(gpt, ids, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", OWN_FAMILIES)
def test_a_family_that_litgpt_lacks_on_a_gpu(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = made(family, tmp_path)
    ids, n_layer = ids_of(source), source.config.n_layer
    stage = StarterStage(spec_of(source.config), n_layer)
    stage.load(stage_parts(0, n_layer, starter=True), source.tensors, CUDA, dtype)
    stage.prepare(len(ids), CUDA, dtype)
    found, start = [], 0
    for n in (40, 1, 1, 28):
        slices = [Slice(3, start, n)]
        rows = stage.embed(torch.from_numpy(ids[start : start + n]).to(CUDA), slices)
        found.append(stage.head(stage(rows, slices)).float().cpu())
        start += n
    wanted = torch.from_numpy(expected(source, ids)).float()
    difference = (torch.cat(found) - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert difference.median() < 16 * torch.finfo(dtype).eps, "a row that another expert gets is far away"


def starter_on_gpu(gpt: torch.nn.Module, packing: Packing | None, dtype: torch.dtype, max_length: int) -> StarterStage:
    """The whole model, with weights that stay packed if a packing is given."""
    n_layer = gpt.config.n_layer
    stage = StarterStage(spec_of(ModelConfig.from_litgpt(gpt.config)), n_layer)
    weights = dict(gpt.state_dict())
    if packing is None:
        stage.load(["all"], lambda _: weights, CUDA, dtype)
    else:
        stage.load(stage_parts(0, n_layer, starter=True), lambda part: weights_of(gpt, packing, part), CUDA, dtype)
    stage.prepare(max_length, CUDA, dtype)
    return stage


def step(stage: StarterStage, ids: list[int], slices: list[tuple[int, int, int]]) -> torch.Tensor:
    return stage.head(stage(stage.embed(torch.tensor(ids, device=CUDA)), slices)).cpu()


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("family", ["Llama-3.1-8B", "Gemma-2-9b", "Qwen3-30B-A3B", "deepseek-v3-shape"])
def test_a_stage_with_packed_weights_on_a_gpu(family: str, form: str) -> None:
    gpt, packing = model_of(family), Packing(form, form)
    exact = dict(gpt.state_dict())
    for part in stage_parts(0, gpt.config.n_layer, starter=True):
        packed = {n: w for n, w in weights_of(gpt, packing, part).items() if not isinstance(w, torch.Tensor)}
        exact.update({name: torch.from_numpy(array.copy()) for name, array in plain(packed).items()})
    reference_model = type(gpt)(gpt.config).eval()
    reference_model.load_state_dict(exact)
    ids = prompt(20, 1)
    stage = starter_on_gpu(gpt, packing, torch.float32, 60)
    found = [int(step(stage, ids, [(0, 0, len(ids))])[-1].argmax())]
    while len(found) < 8:
        found.append(int(step(stage, found[-1:], [(0, len(ids) + len(found) - 1, 1)])[-1].argmax()))
    assert found == greedy(reference_model, ids, 8)


def test_packed_weights_take_no_more_memory_than_packed() -> None:
    matrix = pack("int4", np.ones((4096, 4096), np.float32))
    before = torch.cuda.memory_allocated(CUDA)
    layer = DeviceLinear(matrix, None, CUDA, torch.bfloat16)
    assert codes_of(matrix).numbers.nbytes <= torch.cuda.memory_allocated(CUDA) - before <= 1.01 * matrix.data.nbytes
    del layer


def test_what_torch_keeps_of_freed_memory_counts_as_free() -> None:
    before = device_free_bytes("cuda:0")
    tensor = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    assert device_free_bytes("cuda:0") <= before - (1 << 30)
    del tensor
    assert device_free_bytes("cuda:0") >= before - (64 << 20)


@pytest.mark.parametrize("devices", ["cuda:0,cuda:0", "cuda:0,cpu", "cpu,cuda:0"])
def test_processes_as_nodes_of_one_ring(devices: str) -> None:
    """Two processes on one GPU as two nodes, and a GPU and the CPU, against one node on the CPU."""
    common = ["--ckpt", str(NANO), "--prompt", "ROMEO:", "--prompt", "JULIET: My", "--n-tokens", "40", "--temperature", "0",
              "--dtype", "float32", "--json"]  # fmt: skip
    runs = [["local_ring.py", "--nodes", "2", "--devices", devices], ["sample.py", "--device", "cpu"]]
    found = []
    for launcher, *flags in runs:
        command = [sys.executable, str(SRC / launcher), *flags, *common]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
        found.append([sample["token_ids"] for sample in json.loads(done.stdout)["samples"]])
    assert found[0] == found[1]


def test_packed_weights_in_a_ring_of_a_gpu_and_a_cpu(tmp_path: Path) -> None:
    """Each node computes with the same packed numbers; the CPU's kernels round activations to 8 bits, the GPU does not."""
    checkpoint = write_checkpoint(tmp_path / "model")
    with secondaries(1, tmp_path, device="cuda:0", dtype="float32", quantize="int8") as nodes:
        ids = text_of(cluster_of(nodes), checkpoint, quantize="int8")
    assert len(ids) == 6 and ids[0] == reference("The ring", 6)[0]


@pytest.mark.parametrize("wire", ["auto", "fp16", "int8"])
def test_rows_of_a_gpu_travel(wire: str) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    on_gpu, on_cpu = frame_of(x.to(CUDA), 1, 0, (), (), wire=wire), frame_of(x, 1, 0, (), (), wire=wire)
    assert bytes(on_gpu.payload) == bytes(on_cpu.payload) and on_gpu.dtype == on_cpu.dtype
    torch.testing.assert_close(
        rows_of(on_gpu, 64, CUDA, torch.float32).cpu(), rows_of(on_cpu, 64, torch.device("cpu"), torch.float32)
    )


def test_frames_are_received_into_page_locked_memory() -> None:
    buffers = receive_buffers("cuda:0")
    assert buffers is not None and receive_buffers("cpu") is None
    buffer = np.asarray(pinned_buffer(4096))
    assert buffer.nbytes == 4096 and torch.from_numpy(buffer).is_pinned()


@pytest.mark.parametrize("starters, secondarys", [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_a_ring_with_a_gpu_gives_the_same_text(tmp_path: Path, starters: str, secondarys: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    with secondaries(1, tmp_path, device=secondarys, dtype="float32") as nodes:
        ids = text_of(cluster_of(nodes), checkpoint, device=starters, dtype="float32")
    assert ids == list(reference("The ring", 6))


def test_a_gpu_measures_itself(tmp_path: Path) -> None:
    config = ModelConfig.from_litgpt(config_of("Llama-3.1-8B"))
    computing = choose_computing(config, Requested(device="cuda:0", dtype="float32"), "float32")
    assert computing.packing is None and computing.format == "float32"
    profile = Profiler("node", tmp_path, span_s=0.005).profile(
        Subject(config, "h" * 64, computing, with_head=True), None
    )
    assert profile.device == "cuda:0" and profile.block_s and profile.head_s and profile.process_bytes == 0
    read, n_bytes = reader(1 << 24, "cuda:0")
    read()
    assert n_bytes > 0


def test_what_a_gpu_has() -> None:
    assert choose_device(None) == "cuda" and choose_device("cuda:0") == "cuda:0" and "cuda:0" in devices()
    assert 0 < device_free_bytes("cuda:0") <= torch.cuda.get_device_properties(0).total_memory
    assert machine_free_bytes("cuda:0") > 0
    assert choose_dtype(None, "bfloat16", "cuda:0") in ("bfloat16", "float16")


TRAINING = ("--max-iters", 6, "--ckpt-interval", 3, "--log-interval", 1, "--dtype", "float32")


def test_training_on_a_gpu_follows_the_cpu_and_goes_on(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data")
    found = []
    for device in ("cpu", "cuda"):
        folder = make_shape(tmp_path / device)
        assert train(folder, dataset, *TRAINING, "--device", device) == 0
        assert train(folder, dataset, *TRAINING, "--device", device, "--max-iters", 9, "--init", "resume") == 0
        found.append([float(row["train_loss"]) for row in losses(folder)])
    assert len(found[0]) == 9 and found[1] == pytest.approx(found[0], rel=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes a GPU for each process")
def test_two_gpus_give_the_losses_of_one(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data")
    one, two = make_shape(tmp_path / "one"), make_shape(tmp_path / "two")
    flags = (*TRAINING, "--grad-acc-steps", 4, "--device", "cuda")
    assert train(one, dataset, *flags) == 0
    done = torchrun(2, *argv_of(two, dataset, *flags))
    assert done.returncode == 0, done.stderr
    expected, found = ([float(row["train_loss"]) for row in losses(folder)] for folder in (one, two))
    assert found == pytest.approx(expected, rel=1e-3)
