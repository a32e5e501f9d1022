"""The blocks of a ring as a module of torch: its numbers and gradients are those of one machine, whatever happens to nodes."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from kernel_models import tensors_of
from litgpt.model import GPT

from families import CONTEXT, model_of
from mdi.checkpoint.packing import plain
from mdi.control.client import ControlClient
from mdi.control.messages import BlocksRequest
from mdi.errors import ControlError, MdiError, UsageError
from mdi.kernels.layout import Matrix, pack, unpack
from mdi.model.plain import ModelConfig, spec_of
from mdi.run.local import LocalRing
from mdi.run.nodes import GivenNodes, OwnProcesses
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from mdi.spec.window import WindowMemory, WindowOptions
from mdi.stages.plain_blocks import KeptInputs, PlainBlocks
from mdi_training.ring_blocks import RingBlocks
from secondaries import cluster_of, secondaries
from tiny_checkpoint import random_gpt, tiny_config, tiny_gpt, write_checkpoint

N_TOKENS = 40


def whole(gpt: GPT, x: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """litgpt's own blocks, as its GPT calls them."""
    kinds = gpt.config.rope_indices
    for i in range(start, gpt.config.n_layer if stop is None else stop):
        cos, sin = gpt.cos[: x.size(1)], gpt.sin[: x.size(1)]
        if kinds is not None:
            cos, sin = cos[..., kinds[i]], sin[..., kinds[i]]
        x = gpt.transformer.h[i](x, cos[None], sin[None])
    return x


def rows(n_embd: int, seed: int, n_texts: int = 3) -> torch.Tensor:
    return torch.randn(n_texts, N_TOKENS, n_embd, generator=torch.Generator().manual_seed(seed))


def alike(found: torch.Tensor, expected: torch.Tensor, most: float = 1e-5) -> None:
    assert float((found - expected).norm() / expected.norm()) < most


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("blocks") / "tiny")


def options_of(checkpoint: Path, folder: Path, **changes: Any) -> StarterOptions:
    fields = {"prompt_style": "none", "device": "cpu", "dtype": "float32", "placement": "even", **changes}
    return StarterOptions(ckpt=checkpoint, cache_dir=folder, **fields)


@pytest.mark.parametrize(
    "family", ["Llama-3.1-8B", "Gemma-2-9b", "Gemma-3-1b-it", "pythia-14m", "Qwen3-0.6B", "Mixtral-8x7B-v0.1"]
)
def test_a_stages_gradients_are_those_of_the_model(family: str) -> None:
    gpt = model_of(family)
    config = ModelConfig.from_litgpt(gpt.config)

    def weights(index: int) -> dict[str, Matrix | np.ndarray]:
        return {f"transformer.h.{index}.{name}": w for name, w in tensors_of(gpt, index, "float32").items()}

    n_each = list[int]()
    blocks = PlainBlocks(spec_of(config), weights, lambda: n_each.append(1))
    x, dy = rows(gpt.config.n_embd, 1).requires_grad_(), rows(gpt.config.n_embd, 2)
    expected = whole(gpt, x, 1)
    (gradient,) = torch.autograd.grad(expected, x, dy)
    n_layer = gpt.config.n_layer
    alike(torch.tensor(blocks.forward(x.detach().numpy(), 1, n_layer)), expected.detach())
    alike(torch.tensor(blocks.backward(x.detach().numpy(), dy.numpy(), 1, n_layer)[0]), gradient)
    assert len(n_each) == 3 * (n_layer - 1) - 1 and N_TOKENS <= CONTEXT


def test_inputs_of_blocks_are_computed_once_as_long_as_there_is_memory_for_them() -> None:
    """The gradients have the same bits; other rows, blocks or tensors never get the inputs of these."""
    gpt = tiny_gpt()
    n_layer, n_embd = gpt.config.n_layer, gpt.config.n_embd

    def weights(index: int) -> dict[str, Matrix | np.ndarray]:
        return {f"transformer.h.{index}.{name}": w for name, w in tensors_of(gpt, index, "float32").items()}

    n_each, free = list[int](), [1 << 30]
    kept = KeptInputs(lambda: free[0])
    blocks = PlainBlocks(spec_of(ModelConfig.from_litgpt(gpt.config)), weights, lambda: n_each.append(1), kept)
    alone = PlainBlocks(spec_of(ModelConfig.from_litgpt(gpt.config)), weights)
    dy = rows(n_embd, 1).numpy()
    one, other = ({"transformer.h.1.prompt": rows(n_embd, k)[0, :3].numpy()} for k in (2, 3))
    passes = [
        (rows(n_embd, 4).numpy(), 0, n_layer, one),
        (rows(n_embd, 4).numpy(), 0, n_layer, other),
        (rows(n_embd, 5).numpy(), 0, n_layer, one),
        (rows(n_embd, 4).numpy(), 1, n_layer, one),
        (rows(n_embd, 4).numpy(), 0, n_layer - 1, one),
    ]

    def backward(x: np.ndarray, start: int, stop: int, trained: dict[str, np.ndarray]) -> int:
        """How many blocks were computed."""
        n_each.clear()
        for found, wanted in zip(
            blocks.backward(x, dy, start, stop, trained), alone.backward(x, dy, start, stop, trained), strict=True
        ):
            np.testing.assert_equal(found, wanted)
        return len(n_each)

    n_blocks = [stop - start for _, start, stop, _ in passes]
    for given in passes:
        np.testing.assert_equal(blocks.forward(*given), alone.forward(*given))
    assert [backward(*given) for given in passes] == n_blocks
    assert [backward(*given) for given in passes] == [2 * n - 1 for n in n_blocks], "they are kept for one pass"
    free[0] = 7 * n_layer * dy.nbytes
    for given in passes[:2]:
        blocks.forward(*given)
    assert [backward(*given) for given in passes[:2]] == [2 * n_layer - 1, n_layer], "the memory is enough for one"


class Alive:
    """How many bytes of something live, and the most of them that ever lived at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, what: Any, n_bytes: int) -> None:
        self.now += n_bytes
        self.most = max(self.most, self.now)
        weakref.finalize(what, self._remove, n_bytes)

    def _remove(self, n_bytes: int) -> None:
        self.now -= n_bytes


class Saved:
    """Activations of a tensor that are kept for gradients."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """What only the collection of garbage would free counts as alive."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


OF_A_BLOCK: dict[str, dict[str, tuple[int, ...]]] = {
    "nothing": {},
    "LoRA": {"attn.qkv.1.0.a": (2, 0), "attn.qkv.1.0.b": (2, 4)},
    "a deep prompt": {"prompt": (3, 0)},
    "a prefix": {"prefix_key": (3, -1), "prefix_value": (3, -1)},
}


@pytest.mark.slow
@pytest.mark.parametrize("learned", OF_A_BLOCK)
def test_a_pass_has_the_plain_weights_and_the_activations_of_one_block(
    learned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt = tiny_gpt()
    config = gpt.config
    widths = {0: config.n_embd, -1: config.n_query_groups * config.head_size}
    tensors = {
        f"transformer.h.{i}.{name}": np.full((n, widths.get(width, width)), 0.1, dtype=np.float32)
        for i in range(config.n_layer) for name, (n, width) in OF_A_BLOCK[learned].items()
    }  # fmt: skip
    plain_weights, activations = Alive(), Alive()

    def counted(weights: dict[str, Any]) -> dict[str, np.ndarray]:
        found = {name: array.copy() for name, array in plain(weights).items()}
        for array in found.values():
            plain_weights.add(array, array.nbytes)
        return found

    def saved(tensor: torch.Tensor) -> Saved:
        found = Saved(tensor)
        activations.add(found, tensor.nbytes)
        return found

    def weights(index: int) -> dict[str, Matrix | np.ndarray]:
        return {f"transformer.h.{index}.{name}": w for name, w in tensors_of(gpt, index, "int8").items()}

    monkeypatch.setattr("mdi.stages.plain_blocks.plain", counted)
    blocks = PlainBlocks(spec_of(ModelConfig.from_litgpt(config)), weights)
    x, dy = rows(config.n_embd, 1).numpy(), rows(config.n_embd, 2).numpy()
    one_block = sum(array.nbytes for array in plain(weights(0)).values())
    found = dict[int, int]()
    for n_blocks in (1, config.n_layer):
        activations.most = plain_weights.most = 0
        with without_collection():
            blocks.forward(x, 0, n_blocks, tensors)
            with torch.autograd.graph.saved_tensors_hooks(saved, lambda one: one.tensor):
                blocks.backward(x, dy, 0, n_blocks, tensors)
            assert (plain_weights.now, activations.now) == (0, 0), "nothing stays"
        assert plain_weights.most == one_block
        found[n_blocks] = activations.most
    assert 0 < found[1] == found[config.n_layer] > 10 * x.nbytes


@pytest.mark.parametrize("n_nodes", [1, 2, 3])
def test_gradients_through_the_ring_are_those_of_one_machine(n_nodes: int, checkpoint: Path, tmp_path: Path) -> None:
    gpt = tiny_gpt()
    x = rows(gpt.config.n_embd, 3).requires_grad_()
    loss = whole(gpt, x).square().mean()
    (expected,) = torch.autograd.grad(loss, x)
    with secondaries(n_nodes - 1, tmp_path) as nodes:
        source = GivenNodes(cluster_of(nodes) if nodes else standalone())
        with Run(source, options_of(checkpoint, tmp_path), N_TOKENS, n_texts=1) as run:
            found = RingBlocks(run)(x)
            (gradient,) = torch.autograd.grad(found.square().mean(), x)
            alike(gradient, expected)
            with torch.no_grad():  # finite differences, along a direction
                v, eps = rows(gpt.config.n_embd, 4), 1e-2
                more, less = (RingBlocks(run)(x + sign * eps * v).double().square().mean() for sign in (1, -1))
            assert float((more - less) / (2 * eps)) == pytest.approx(float((gradient * v).sum()), rel=5e-3)
            alike(RingBlocks(run, 1, 4)(x).detach(), whole(gpt, x, 1, 4).detach())
            for wrong in (x[0], x[:, :, :-1], x[:0], torch.cat([x, x], dim=1)):
                with pytest.raises(UsageError):
                    RingBlocks(run)(wrong)
            with pytest.raises(UsageError):
                RingBlocks(run, 2, 99)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_packed_blocks_have_the_gradients_of_the_numbers_that_they_stand_for(
    form: str, checkpoint: Path, tmp_path: Path
) -> None:
    gpt = random_gpt(tiny_config(), 4)
    with torch.no_grad():
        for block in gpt.transformer.h:  # gains of norms belong to the weights that read them
            block.attn.qkv.weight *= block.norm_1.weight
            for layer in (block.mlp.fc_1, block.mlp.fc_2):
                layer.weight *= block.norm_2.weight
            for name, weight in block.named_parameters():
                weight.copy_(
                    torch.tensor(unpack(pack(form, weight.numpy(), name))) if weight.dim() == 2 else weight.new_ones(1)
                )
    x, dy = rows(gpt.config.n_embd, 5).requires_grad_(), rows(gpt.config.n_embd, 6)
    expected = whole(gpt, x)
    (gradient,) = torch.autograd.grad(expected, x, dy)
    with (
        secondaries(1, tmp_path) as nodes,
        Run(GivenNodes(cluster_of(nodes)), options_of(checkpoint, tmp_path, quantize=form), N_TOKENS, n_texts=1) as run,
    ):
        found = RingBlocks(run)(x)
        alike(found.detach(), expected.detach(), 1e-4)
        alike(torch.autograd.grad(found, x, dy)[0], gradient, 1e-4)


@pytest.mark.slow
def test_a_node_that_is_lost_between_both_ways_changes_no_gradient(checkpoint: Path, tmp_path: Path) -> None:
    """Also of what is trained in each block: the nodes of the next ring have other blocks."""
    gpt = tiny_gpt()
    x, dy = rows(gpt.config.n_embd, 7).requires_grad_(), rows(gpt.config.n_embd, 8)
    prompts = {f"transformer.h.{i}.prompt": rows(gpt.config.n_embd, i)[0, :3].requires_grad_() for i in range(5)}
    expected = x
    for i, prompt in enumerate(prompts.values()):
        added = torch.cat([expected[:, :3] + prompt, expected[:, 3:]], dim=1)
        expected = whole(gpt, added, i, i + 1)
    wanted = torch.autograd.grad(expected, [x, *prompts.values()], dy)
    others = set(psutil.Process().children())  # such as a server of other tests
    source = OwnProcesses(lambda: LocalRing(3, None, 1, None, False, False), lambda ring: ring.cluster)
    with source, Run(source, options_of(checkpoint, tmp_path), N_TOKENS, n_texts=1) as run:
        found = RingBlocks(run)(x, prompts)
        max(set(psutil.Process().children()) - others, key=psutil.Process.create_time).kill()
        for one, other in zip(torch.autograd.grad(found, [x, *prompts.values()], dy), wanted, strict=True):
            alike(one, other)
        assert run.n_recoveries == 1 and len(run.names) == 2
        alike(RingBlocks(run)(x).detach(), whole(gpt, x).detach())


def test_what_has_no_gradients_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    window = WindowMemory(window=WindowOptions(2))
    with (
        Run(
            GivenNodes(standalone()), options_of(checkpoint, tmp_path, weight_memory=window), N_TOKENS, n_texts=1
        ) as run,
        pytest.raises(UsageError, check=lambda e: e.code == "kernels"),
    ):
        RingBlocks(run)(rows(tiny_gpt().config.n_embd, 1))


NODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in a window": ({"weight_memory": WindowMemory(window=WindowOptions(2))}, {}),
    "in torch": ({"dtype": "bfloat16"}, {}),
    "in a group": ({}, {"group": "g"}),
}


@pytest.mark.parametrize("case", NODES)
def test_a_node_without_gradients_is_known_before_rows_are_sent(case: str, checkpoint: Path, tmp_path: Path) -> None:
    of_node, of_entry = NODES[case]
    with secondaries(2, tmp_path, **of_node) as nodes:
        cluster = cluster_of(nodes, **of_entry)
        with (
            Run(GivenNodes(cluster), options_of(checkpoint, tmp_path), N_TOKENS, n_texts=1) as run,
            pytest.raises(MdiError, check=lambda e: e.code == "kernels"),
        ):
            RingBlocks(run)(torch.zeros(1, 1, tiny_gpt().config.n_embd))


def test_a_node_takes_no_other_rows_than_its_run_has(checkpoint: Path, tmp_path: Path) -> None:
    with (
        secondaries(1, tmp_path) as nodes,
        Run(GivenNodes(cluster_of(nodes)), options_of(checkpoint, tmp_path), N_TOKENS, n_texts=1) as run,
    ):
        client: ControlClient = run.clients[0]
        start, stop = run.model.weights.blocks[1]
        right = BlocksRequest(run.run_id, (start, stop), 1, 4)
        data = bytes(4 * 4 * tiny_gpt().config.n_embd)
        assert len(client.blocks(right, [memoryview(data)], len(data))) == len(data)
        others = ({"n_tokens": N_TOKENS + 1}, {"blocks": (0, stop)}, {"run": "0" * 16}, {"blocks": (stop, start)},
                  {"blocks": (start, start)}, {"n_texts": 1 << 20})  # fmt: skip
        cases: list[tuple[dict[str, Any], bytes]] = [
            ({}, data[:-4]),
            ({}, data * 2),
            *((other, data) for other in others),
        ]
        for changes, sent in cases:
            request = BlocksRequest(**{**vars(right), **changes})
            with pytest.raises(ControlError) as e:
                client.blocks(request, [memoryview(sent)], len(data))
            assert e.value.status in (400, 409)
        assert len(client.blocks(right, [memoryview(data)], len(data))) == len(data), "and goes on"
