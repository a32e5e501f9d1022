"""Blocks in torch of families that litgpt lacks: the numbers of the definitions, with caches and with gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mdi.checkpoint.packing import Packing, plain
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.source import LitCheckpoint
from mdi.errors import EngineError
from mdi.kernels.slices import Slice
from mdi.model.plain import spec_of
from mdi.model.spec import Dense, Experts, Router
from mdi.model.tensors import block_tensors, end_tensors
from mdi.stages import torch_stage as stage_module
from mdi.stages.plain_blocks import PlainBlocks
from mdi.stages.torch_attention import Positions, Texts
from mdi.stages.torch_block import Block, Chosen, keep_rows_apart
from mdi.stages.torch_packed import DeviceLayers
from mdi.stages.torch_stage import StarterStage
from test_own_families import FAMILIES, LENGTH, expected, ids_of, made

CPU = torch.device("cpu")
FRAMES = ((40, 10), (1, 1), (1, 1), (1, 7), (26, 0), (1, 0))  # rows of two texts, the second of which ends earlier


@pytest.fixture(scope="module", params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LitCheckpoint:
    return made(request.param, tmp_path_factory.mktemp("families"))


def stage_of(
    source: LitCheckpoint, dtype: torch.dtype = torch.float32, packing: Packing | None = None, is_plain: bool = False
) -> StarterStage:
    """
    Args:
        is_plain: its packed weights are unpacked before.
    """
    n_layer = source.config.n_layer
    stage = StarterStage(spec_of(source.config), n_layer)

    def weights(part: str) -> dict:
        found = source.tensors(part) if packing is None else dict(source.weights(part, packing))
        return {name: torch.from_numpy(array.copy()) for name, array in plain(found).items()} if is_plain else found

    stage.load(stage_parts(0, n_layer, starter=True), weights, CPU, dtype)
    stage.prepare(LENGTH, CPU, dtype)
    return stage


def logits_of(stage: StarterStage, ids: np.ndarray) -> torch.Tensor:
    """Of the text and, behind it, of its beginning as another text of the same frames."""
    starts, found = [0, 0], ([], [])
    for frame in FRAMES:
        slices = [Slice(5 + i, start, n) for i, (start, n) in enumerate(zip(starts, frame, strict=True)) if n]
        rows = np.concatenate([ids[start : start + n] for start, n in zip(starts, frame, strict=True)])
        logits = stage.head(stage(stage.embed(torch.from_numpy(rows), slices), slices)).float()
        for i, one in enumerate(logits.split(list(frame))):
            found[i].append(one)
            starts[i] += frame[i]
    return torch.cat([*found[0], *found[1]])


def test_logits_are_those_of_the_definition(source: LitCheckpoint) -> None:
    ids = ids_of(source)
    found, wanted = logits_of(stage_of(source), ids).numpy(), expected(source, ids)
    assert len(found) == LENGTH + 19
    assert np.abs(found[:LENGTH] - wanted).max() < 1e-4 and np.abs(found[LENGTH:] - wanted[:19]).max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fewer_bits_are_near(source: LitCheckpoint, dtype: torch.dtype) -> None:
    ids = ids_of(source)
    wanted = torch.from_numpy(expected(source, ids)).float()
    difference = (logits_of(stage_of(source, dtype), ids)[:LENGTH] - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert difference.median() < 16 * torch.finfo(dtype).eps, "a row that another expert gets is far away"


def test_tensors_are_those_of_the_spec(source: LitCheckpoint) -> None:
    spec, found = spec_of(source.config), StarterStage(spec_of(source.config), source.config.n_layer).state_dict()
    wanted = end_tensors(spec)
    for i, block in enumerate(spec.blocks):
        wanted |= {f"transformer.h.{i}.{name}": shape for name, shape in block_tensors(block, spec.width).items()}
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == wanted


@pytest.mark.parametrize("is_device", [False, True])
def test_packed_weights_are_what_they_stand_for(
    source: LitCheckpoint, is_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, packing = ids_of(source), Packing("mxfp4", "int8")
    wanted = logits_of(stage_of(source, packing=packing, is_plain=True), ids)
    if is_device:
        monkeypatch.setattr(stage_module, "layers_for", DeviceLayers)
    found = logits_of(stage_of(source, packing=packing), ids)
    difference = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert difference.median() < (1e-5 if is_device else 0.1), "on a CPU the kernels round activations"


def test_positions_that_a_model_has_not_learned_are_refused(tmp_path: Path) -> None:
    stage = stage_of(made("opt", tmp_path))
    for slices in ([Slice(1, LENGTH - 1, 2)], [Slice(1, 0, 1)], []):
        with pytest.raises(EngineError):
            stage.embed(torch.tensor([1, 2]), slices)


def test_taps_add_their_rows_and_change_no_others(tmp_path: Path) -> None:
    source = made("falcon-rw", tmp_path)
    stage, ids = stage_of(source), torch.from_numpy(ids_of(source)[:9])
    slices = [Slice(1, 0, 5, 1), Slice(2, 0, 4, 2)]
    x = stage.embed(ids, slices)
    wanted = stage(x, slices)
    found = stage(x, slices, (0, source.config.n_layer - 1))
    assert torch.equal(found[:9], wanted) and torch.equal(found[12:], wanted[[4, 7, 8]]) and len(found) == 15


def test_a_gate_of_the_shared_expert_depends_on_its_row_alone() -> None:
    mlp = Dense(8, "silu", is_gated=True)
    chosen = Chosen(Experts(3, 1, mlp, Router("softmax", True), mlp, has_shared_gate=True), 333)
    generator = torch.Generator().manual_seed(2)
    for parameter in chosen.parameters():  # of which some are not filled
        parameter.data = torch.randn(parameter.shape, generator=generator) / 20
    gate, same = chosen.shared_experts.gate, torch.nn.Identity()
    same.gate = gate
    chosen.shared_experts, chosen.experts = same, torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))
    keep_rows_apart(chosen)
    x = torch.randn(77, 333, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = chosen(x)
        assert all(torch.equal(chosen(x[:n]), whole[:n]) for n in (1, 2, 5, 13, 64))


def plain_blocks(source: LitCheckpoint) -> PlainBlocks:
    return PlainBlocks(
        spec_of(source.config), lambda i: {name: array.numpy() for name, array in source.tensors(f"block.{i}").items()}
    )


def test_whole_texts_have_the_rows_of_frames(source: LitCheckpoint) -> None:
    ids = ids_of(source)
    texts = np.stack([ids[:30], ids[30:60]])
    stage, n_layer = stage_of(source), source.config.n_layer
    rows = [stage.embed(torch.from_numpy(text), [Slice(1, 0, 30)]) for text in texts]
    found = torch.from_numpy(plain_blocks(source).forward(torch.stack(rows).numpy(), 0, n_layer))
    for i, one in enumerate(rows):
        torch.testing.assert_close(found[i], stage(one, [Slice(1, 0, 30)]), atol=2e-5, rtol=2e-5)


def test_gradients_are_those_of_finite_differences(source: LitCheckpoint) -> None:
    """In float64, along a direction, of rows and of weights of linear layers and norms, which adapters change."""
    spec = spec_of(source.config)
    generator = torch.Generator().manual_seed(6)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    blocks = [Block(of, spec.width) for of in spec.blocks]
    for i, block in enumerate(blocks):
        own = {name.removeprefix(f"transformer.h.{i}."): one for name, one in source.tensors(f"block.{i}").items()}
        block.load_state_dict(own, assign=True)
        block.double()
    learned = [
        p for block in blocks for name, p in block.named_parameters() if "qkv" in name or name.startswith("mlp.proj")
    ]
    x, dy = draw(2 * 25, spec.width).requires_grad_(), draw(2 * 25, spec.width)

    def value() -> torch.Tensor:
        y = x
        for block in blocks:
            y = block(y, Texts(2, 25, Positions(25, CPU)))
        return (y * dy).sum()

    wanted = [x, *learned]
    gradients = torch.autograd.grad(value(), wanted)
    for which in (slice(0, 1), slice(1, None)):
        directions = [draw(*one.shape) for one in wanted[which]]
        values = []
        for eps in (1e-5, -2e-5):  # the second one from where the first one went
            with torch.no_grad():
                for one, direction in zip(wanted[which], directions, strict=True):
                    one += eps * direction
                values.append(float(value()))
        with torch.no_grad():
            for one, direction in zip(wanted[which], directions, strict=True):
                one += 1e-5 * direction
        along = sum(float((g * d).sum()) for g, d in zip(gradients[which], directions, strict=True))
        assert (values[0] - values[1]) / 2e-5 == pytest.approx(along, rel=1e-2), "routers compute in float32"
