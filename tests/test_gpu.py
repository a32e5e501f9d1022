"""What only a GPU does: stages, frames and measurements on CUDA. Skipped where there is none."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from families import FAMILIES, config_of, greedy, model_of, prompt
from mdi.control.requested import Requested
from mdi.engine.sequence import SamplingParams
from mdi.engine.tensors import frame_of, pinned_buffer, rows_of
from mdi.machine.computing import choose_computing
from mdi.machine.device import choose_device, choose_dtype, devices
from mdi.machine.resources import device_free_bytes, machine_free_bytes
from mdi.measure.profiler import Profiler
from mdi.measure.profiling import Subject
from mdi.measure.reading import reader
from mdi.model.stage import Stage
from mdi.node.forming import receive_buffers
from mdi.node.options import StarterOptions
from mdi.node.starter import StarterNode
from secondaries import cluster_of, secondaries
from tiny_checkpoint import encode, plain, reference, write_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_on_a_gpu_gives_the_tokens_of_the_model(family: str) -> None:
    gpt = model_of(family)
    ids = prompt(20, 1)
    stage = Stage(gpt.config, 0, gpt.config.n_layer)
    stage.load_state_dict({k: v for k, v in gpt.state_dict().items() if k.startswith("transformer.h.")}, assign=True)
    stage.to(CUDA).prepare(60, CUDA, torch.float32)
    found: list[int] = []
    for _ in range(8):
        rows = gpt.transformer.wte(torch.tensor([*ids, *found])[-1 if found else 0 :])
        first = len(ids) + len(found) - 1 if found else 0
        x = stage(rows.to(CUDA), [(0, first, len(rows))])[-1:].cpu()
        found.append(int(gpt.lm_head(gpt.transformer.ln_f(x)).argmax()))
    assert found == greedy(gpt, ids, 8)


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
        starter = StarterNode(
            cluster_of(nodes), StarterOptions(ckpt=checkpoint, prompt_style="none", device=starters, dtype="float32")
        )
        try:
            starter.open()
            starter.prepare(60)
            starter.start()
            sample = starter.submit("The ring", encode("The ring"), SamplingParams(6, temperature=0))
            starter.generate()
            starter.end()
        finally:
            starter.close()
    assert sample.token_ids == list(reference("The ring", 6))


def test_a_gpu_measures_itself(tmp_path: Path) -> None:
    config = plain(asdict(config_of("Llama-3.1-8B")))
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
