"""Training through the blocks of a ring: the gradients of one machine, on any nodes; what was learned in PEFT's form."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import signal
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from kernel_models import tensors_of
from litgpt.config import Config
from litgpt.model import GPT, KVCache
from safetensors.numpy import load_file, save_file
from torch.nn import functional

from families import config_of, random_gpt
from mdi.checkpoint.adapters import AdapterName
from mdi.checkpoint.packing import FOLDED_FORMATS
from mdi.checkpoint.safetensors_layout import read_header
from mdi.checkpoint.virtual_adapters import open_adapter
from mdi.cli import launch
from mdi.control.client import ControlClient
from mdi.control.messages import BlocksRequest, TensorsRequest
from mdi.errors import CheckpointError, ControlError, MdiError, UsageError
from mdi.kernels.layout import Matrix, pack, unpack
from mdi.kernels.weight_formats import format_within
from mdi.model.plain import ModelConfig, spec_of
from mdi.net.message import Message
from mdi.run.local import LocalRing
from mdi.run.nodes import GivenNodes, OwnProcesses
from mdi.run.passes import Bytes
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from mdi.spec.window import WindowMemory, WindowOptions
from mdi.stages.plain_blocks import PlainBlocks
from mdi.stages.trained_tensors import hash_of, header_of, is_learned, joined_bytes, of_blocks
from mdi_training.examples import Example
from mdi_training.frozen_head import FrozenHead, Sum
from mdi_training.ring_blocks import RingBlocks
from mdi_training.ring_training import PART_ROWS, RingTraining, TunedModel, embedding_of
from mdi_training.tuned_tensors import KEY, Lora, TunedTensors, TuningKind, n_numbers, new_tensors, read_tensors
from mdi_training.tuning import Steps, Tuning, TuningSettings, train
from secondaries import cluster_of, secondaries
from tiny_checkpoint import tiny_config, tiny_gpt, write_checkpoint

N = 3  # blocks
LENGTH = 5  # of prompts and prefixes
METHODS = ("lora", "prompt", "deep-prompt", "prefix")
EVERY = ("query", "key", "value", "projection", "mlp")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("training") / "tiny", n_layer=N, with_end=False)


def blocks_of(gpt: GPT) -> PlainBlocks:
    def weights(index: int) -> dict[str, Matrix | np.ndarray]:
        return {f"transformer.h.{index}.{name}": w for name, w in tensors_of(gpt, index, "float32").items()}

    return PlainBlocks(spec_of(ModelConfig.from_litgpt(gpt.config)), weights)


def drawn(kind: TuningKind, config: Config, seed: int = 1) -> TunedTensors:
    """Tensors that are all different from what they begin with."""
    made = new_tensors(kind, ModelConfig.from_litgpt(config), seed, lambda part: NoNorms())
    draw(made.named.values(), seed)
    return made


def draw(parameters: Iterable[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)


def behind_prompt(tuned: TunedTensors, x: torch.Tensor) -> torch.Tensor:
    """Rows of texts behind the rows that are learned, if there are some: (texts, tokens, n_embd)"""
    before = tuned.before()
    return x if before is None else torch.cat([before.expand(len(x), -1, -1), x], dim=1)


def exact(gpt: GPT, tuned: TunedTensors) -> tuple[GPT, TunedTensors]:
    """Copies of both in float64."""
    gpt = copy.deepcopy(gpt)
    cos, sin = gpt.cos, gpt.sin  # stay the tables of float32, which are part of the model
    gpt = gpt.double()
    gpt.cos, gpt.sin = cos.double(), sin.double()
    tuned = copy.deepcopy(tuned)
    for name, one in tuned.named.items():
        tuned.named[name] = torch.nn.Parameter(one.detach().double())
    return gpt, tuned


class NoNorms:
    """A source of weights whose norms have no gains to tell."""

    specs: dict[str, Any] = {}


class Before(KVCache):
    """A cache that only has a prefix (rows, groups, head_size), and gives it gradients."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        super().__init__((1, 1, 1, 1), (1, 1, 1, 1))
        self.prefix = key, value

    def forward(self, input_pos: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.cat([one.transpose(0, 1).expand(len(rows), -1, -1, -1), rows], dim=2)
            for one, rows in zip(self.prefix, (k, v), strict=True)
        )


def reference(gpt: GPT, x: torch.Tensor, tuned: TunedTensors) -> torch.Tensor:
    """litgpt's own blocks; weights with LoRA in them, prompts added, prefixes where litgpt's own caches have them.

    In float64 (`exact`): adapters that are drawn make scores large, and then float32 itself is wrong by nearly 1e-5, in a way
    of its own on each processor.
    """
    n_before = LENGTH if tuned.kind.method == "prefix" else 0
    n_rows = x.size(1)
    positions = torch.arange(n_before, n_before + n_rows)
    cos, sin = gpt.cos[positions][None], gpt.sin[positions][None]
    for i, block in enumerate(gpt.transformer.h):
        changed = {name: p.detach() for name, p in block.named_parameters()}
        arguments: tuple[Any, ...] = (cos, sin)
        block.attn.kv_cache = None
        if tuned.kind.method == "lora":
            changed["attn.qkv.weight"] = changed["attn.qkv.weight"] + with_adapters(tuned, i, gpt.config)
            for ours, theirs in (
                ("attn.proj", "self_attn.o_proj"), ("mlp.fc_1", "mlp.gate_proj"), ("mlp.fc_2", "mlp.up_proj"),
                ("mlp.proj", "mlp.down_proj"),
            ):  # fmt: skip
                changed[f"{ours}.weight"] = changed[f"{ours}.weight"] + product(tuned, i, theirs)
        elif tuned.kind.method == "prefix":
            names = (f"transformer.h.{i}.prefix_{name}" for name in ("key", "value"))
            block.attn.kv_cache = Before(
                *(tuned.named[name].view(LENGTH, gpt.config.n_query_groups, -1) for name in names)
            )
            mask = torch.ones(n_before + n_rows, n_before + n_rows).tril().bool()[positions][None, None]
            arguments = cos, sin, mask, positions
        elif i and tuned.kind.method == "deep-prompt":
            x = torch.cat([x[:, :LENGTH] + tuned.named[f"transformer.h.{i}.prompt"], x[:, LENGTH:]], dim=1)
        x = torch.func.functional_call(block, changed, (x, *arguments))
        block.attn.kv_cache = None
    return x


def product(tuned: TunedTensors, block: int, module: str) -> torch.Tensor:
    path = f"base_model.model.model.layers.{block}.{module}"
    scale = tuned.kind.alpha / tuned.kind.rank
    return scale * tuned.named[f"{path}.lora_B.weight"] @ tuned.named[f"{path}.lora_A.weight"]


def with_adapters(tuned: TunedTensors, block: int, config: Config) -> torch.Tensor:
    return torch.cat([product(tuned, block, f"self_attn.{one}_proj") for one in "qkv"])


def alike(found: torch.Tensor, expected: torch.Tensor, most: float) -> None:
    assert float((found - expected).detach().norm() / expected.detach().norm()) < most


def arrays(tuned: TunedTensors) -> dict[str, np.ndarray]:
    return {name: one.detach().numpy() for name, one in tuned.of_blocks().items()}


@pytest.mark.parametrize("method", METHODS)
def test_rows_and_gradients_are_those_of_litgpt(method: str) -> None:
    """And finite differences."""
    gpt = random_gpt(tiny_config(n_layer=N), 3)
    tuned = drawn(TuningKind(method, 3, 7, EVERY, LENGTH), gpt.config)
    blocks, generator = blocks_of(gpt), torch.Generator().manual_seed(2)
    x, dy = (torch.randn(2, 11, gpt.config.n_embd, generator=generator) for _ in range(2))
    gpt_of_float64, tuned_of_float64 = exact(gpt, tuned)
    x_of_float64 = x.double().requires_grad_()
    expected = reference(gpt_of_float64, x_of_float64, tuned_of_float64)
    found = torch.tensor(blocks.forward(x.numpy(), 0, N, arrays(tuned)))
    alike(found, expected, 1e-5)
    dx, learned = blocks.backward(x.numpy(), dy.numpy(), 0, N, arrays(tuned))
    of_blocks = tuned.of_blocks()
    assert learned.keys() == of_blocks.keys()
    used, used_of_float64 = (
        [p for name, p in one.named.items() if name != "prompt_embeddings"] for one in (tuned, tuned_of_float64)
    )
    wanted = torch.autograd.grad(expected, [x_of_float64, *used_of_float64], dy.double())
    alike(torch.tensor(dx), wanted[0], 1e-5)
    got = torch.autograd.grad(
        list(of_blocks.values()), used, [torch.tensor(learned[name]) for name in of_blocks]
    ) if used else ()  # fmt: skip
    for one, other in zip(got, wanted[1:], strict=True):
        alike(one, other, 1e-5)
    for name, tensor in arrays(tuned).items():
        size = float(np.linalg.norm(learned[name]))
        v, eps = learned[name] / size, 3e-3 * float(np.linalg.norm(tensor))
        more, less = (
            blocks.forward(x.numpy(), 0, N, {**arrays(tuned), name: tensor + sign * eps * v}) for sign in (1, -1)
        )
        difference = float(((more.astype(np.float64) - less) * dy.numpy()).sum()) / (2 * eps)
        assert difference == pytest.approx(size, rel=2e-2), name


# Over a ring


def options_of(checkpoint: Path, folder: Path, **changes: Any) -> StarterOptions:
    fields = {"prompt_style": "none", "device": "cpu", "dtype": "float32", "placement": "even", **changes}
    return StarterOptions(ckpt=checkpoint, cache_dir=folder, **fields)


def examples_of(n: int = 6) -> list[Example]:
    generator = np.random.default_rng(5)
    texts = [tuple(map(int, generator.integers(0, 300, 4 + 3 * i % 11))) for i in range(n)]
    return [Example(ids[:-1], i % 2, ids[1 + i % 2 :]) for i, ids in enumerate(texts)]


def training_of(run: Run, kind: TuningKind, n_steps: int, lr: float = 0.02) -> RingTraining:
    weights = run.model.weights
    tuned = new_tensors(kind, weights.config, 3, weights.source_of, embedding_of(run))
    state = tiny_gpt(n_layer=N).state_dict()
    head = FrozenHead(
        spec_of(weights.config), {name: state[name].numpy() for name in ("lm_head.weight", "transformer.ln_f.weight")}
    )
    return RingTraining(TunedModel(run, tuned, head), examples_of(), 6, TuningSettings(n_steps // 2, 3, lr, 7), 2)


def curve(
    checkpoint: Path, folder: Path, n_nodes: int, kind: TuningKind, n_steps: int = 8, lr: float = 0.02
) -> list[float]:
    with secondaries(n_nodes - 1, folder) as nodes:
        source = GivenNodes(cluster_of(nodes) if nodes else standalone())
        with Run(source, options_of(checkpoint, folder), 20, n_texts=1) as run:
            training = training_of(run, kind, n_steps, lr)
            found = [training.step() for _ in range(n_steps)]
            assert (training.last_bytes.sent > 0) == (n_nodes > 1)
            return found


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_losses_are_the_same_on_any_number_of_nodes(method: str, checkpoint: Path, tmp_path: Path) -> None:
    kind = TuningKind(method, 2, 4, EVERY, LENGTH)
    alone = curve(checkpoint, tmp_path, 1, kind)
    assert alone[-2] < 0.99 * alone[0] and alone[-1] < 0.99 * alone[1], "it learns"
    assert curve(checkpoint, tmp_path, 3, kind) == pytest.approx(alone, rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_curve_of_200_steps_is_the_same_over_any_nodes_and_when_one_is_killed(
    checkpoint: Path, tmp_path: Path
) -> None:
    kind, n_steps = TuningKind("lora", 2, 4), 200
    alone = curve(checkpoint, tmp_path, 1, kind, n_steps, 0.002)
    assert alone[-2] < 0.95 * alone[0] and alone[-1] < 0.95 * alone[1], "it learns"
    for n_nodes in (2, 3):
        assert curve(checkpoint, tmp_path, n_nodes, kind, n_steps, 0.002) == pytest.approx(alone, rel=1e-5)
    assert killed_curve(checkpoint, tmp_path, kind, n_steps, 0.002) == pytest.approx(alone, rel=1e-5)


# One method inside of the blocks and one that has rows before them; the others take the same ways through a run.
@pytest.mark.parametrize(
    "method",
    [
        "lora",
        "prefix",
        *(pytest.param(one, marks=pytest.mark.slow) for one in METHODS if one not in ("lora", "prefix")),
    ],
)
def test_a_node_that_is_killed_changes_no_loss(method: str, checkpoint: Path, tmp_path: Path) -> None:
    kind = TuningKind(method, 2, 4, length=LENGTH)
    alone = curve(checkpoint, tmp_path, 1, kind)
    assert killed_curve(checkpoint, tmp_path, kind, 8, 0.02) == pytest.approx(alone, rel=1e-6)


def killed_curve(checkpoint: Path, folder: Path, kind: TuningKind, n_steps: int, lr: float) -> list[float]:
    """Over three nodes, of which one is killed in the middle."""
    others = set(psutil.Process().children())  # such as a server of other tests
    source = OwnProcesses(lambda: LocalRing(3, None, 1, None, False, False), lambda ring: ring.cluster)
    with source, Run(source, options_of(checkpoint, folder, wait_s=120), 20, n_texts=1) as run:
        training, found = training_of(run, kind, n_steps, lr), []
        for k in range(n_steps):
            found.append(training.step())
            if k == n_steps // 2:
                max(set(psutil.Process().children()) - others, key=psutil.Process.create_time).kill()
        assert run.n_recoveries == 1 and len(run.names) == 2
        return found


@pytest.mark.parametrize("method", METHODS)
def test_a_step_has_the_gradients_of_one_machine(method: str, checkpoint: Path, tmp_path: Path) -> None:
    """Texts of several lengths in several parts against litgpt's GPT text by text."""
    gpt, kind = tiny_gpt(n_layer=N), TuningKind(method, 3, 7, EVERY, LENGTH)
    with secondaries(1, tmp_path) as nodes, Run(
        GivenNodes(cluster_of(nodes)), options_of(checkpoint, tmp_path), 20, n_texts=1
    ) as run:  # fmt: skip
        training = training_of(run, kind, 8)
        draw(training.named.values(), 6)
        loss = training.learn(range(5))
        found = {name: one.grad for name, one in training.named.items()}
    tuned = drawn(kind, gpt.config)
    for name, parameter in training.named.items():
        tuned.named[name] = torch.nn.Parameter(parameter.detach().clone())
    gpt, tuned = exact(gpt, tuned)
    total, n_rows = torch.zeros(()), sum(one.n_rows for one in training.examples[:5])
    for one in training.examples[:5]:
        x = behind_prompt(tuned, gpt.transformer.wte(torch.tensor(one.ids)).detach()[None])
        rows = gpt.transformer.ln_f(reference(gpt, x, tuned)[0, one.read_from - len(one.ids) :])
        total = total + functional.cross_entropy(gpt.lm_head(rows), torch.tensor(one.targets), reduction="sum") / n_rows
    assert loss == pytest.approx(float(total.detach()), rel=1e-6)
    wanted = torch.autograd.grad(total, list(tuned.named.values()))
    for name, gradient in zip(tuned.named, wanted, strict=True):
        got = found[name]
        assert got is not None
        alike(got, gradient, 1e-5)


@pytest.mark.parametrize("form", ["int8", "int4", "mxfp4"])
@pytest.mark.parametrize("method", METHODS)
def test_packed_blocks_have_the_gradients_of_the_numbers_that_they_stand_for(
    method: str, form: str, checkpoint: Path, tmp_path: Path
) -> None:
    """int8 and int4 weights have the gains of their norms in them; LoRA's A reads rows that have been multiplied by these."""
    gpt = random_gpt(tiny_config(n_layer=N), 4)
    kind, gains = TuningKind(method, 3, 7, ("query", "value", "mlp"), LENGTH), list[dict[str, torch.Tensor]]()
    with torch.no_grad():
        for block in gpt.transformer.h:
            gains.append({"self_attn": torch.ones(()), "mlp": torch.ones(())})
            if form in FOLDED_FORMATS:
                gains[-1] = {"self_attn": block.norm_1.weight.clone(), "mlp": block.norm_2.weight.clone()}
                for norm, *layers in ((block.norm_1, block.attn.qkv), (block.norm_2, block.mlp.fc_1, block.mlp.fc_2)):
                    for layer in layers:
                        layer.weight *= norm.weight
                    norm.weight.fill_(1)
            for name, weight in block.named_parameters():
                if weight.dim() == 2:
                    weight.copy_(torch.tensor(unpack(pack(format_within(form, f"block.{name}"), weight.numpy(), name))))
    x = torch.randn(2, 9, gpt.config.n_embd, generator=torch.Generator().manual_seed(5))
    with secondaries(1, tmp_path) as nodes, Run(
        GivenNodes(cluster_of(nodes)), options_of(checkpoint, tmp_path, quantize=form), 20, n_texts=1
    ) as run:  # fmt: skip
        weights = run.model.weights
        tuned = new_tensors(kind, weights.config, 1, weights.source_of)
        draw(tuned.named.values(), 6)
        x = behind_prompt(tuned, x)
        found = RingBlocks(run)(x, tuned.of_blocks())
        got = torch.autograd.grad(found.square().mean(), list(tuned.named.values()))
    expected = with_lora(gpt, x, tuned, gains) if method == "lora" else reference(gpt, x, tuned)
    alike(found, expected, 1e-4)
    wanted = torch.autograd.grad(expected.square().mean(), list(tuned.named.values()))
    for one, other in zip(got, wanted, strict=True):
        alike(one, other, 1e-4)


def with_lora(gpt: GPT, x: torch.Tensor, tuned: TunedTensors, gains: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """litgpt's blocks, with LoRA on queries, values and MLPs whose A reads rows that are multiplied by `gains`."""
    for i, block in enumerate(gpt.transformer.h):
        changed = {name: p.detach() for name, p in block.named_parameters()}
        qkv = torch.zeros_like(changed["attn.qkv.weight"])
        n_q, n_kv = gpt.config.n_head * gpt.config.head_size, gpt.config.n_query_groups * gpt.config.head_size
        qkv = torch.cat([product(tuned, i, "self_attn.q_proj"), qkv[:n_kv], product(tuned, i, "self_attn.v_proj")])
        assert len(qkv) == n_q + 2 * n_kv
        changed["attn.qkv.weight"] = changed["attn.qkv.weight"] + qkv * gains[i]["self_attn"]
        for ours, theirs in (("fc_1", "gate_proj"), ("fc_2", "up_proj")):
            changed[f"mlp.{ours}.weight"] = (
                changed[f"mlp.{ours}.weight"] + product(tuned, i, f"mlp.{theirs}") * gains[i]["mlp"]
            )
        changed["mlp.proj.weight"] = changed["mlp.proj.weight"] + product(tuned, i, "mlp.down_proj")
        n = x.size(1)
        x = torch.func.functional_call(block, changed, (x, gpt.cos[:n][None], gpt.sin[:n][None]))
    return x


def test_a_node_takes_no_other_tensors_than_its_blocks_have(checkpoint: Path, tmp_path: Path) -> None:
    with (
        secondaries(1, tmp_path) as nodes,
        Run(GivenNodes(cluster_of(nodes)), options_of(checkpoint, tmp_path), 20, n_texts=1) as run,
    ):
        client: ControlClient = run.clients[0]
        start, stop = run.model.weights.blocks[1]
        config = tiny_gpt(n_layer=N).config
        width, kv = config.n_embd, config.n_query_groups * config.head_size
        x = np.ones((1, 4, width), dtype=np.float32)

        def give(tensors: dict[str, Any], cut: int = 0, **changes: Any) -> str:
            header, sha256 = header_of(tensors), hash_of(tensors)
            request = TensorsRequest(run.run_id, (start, stop), sha256, len(header))
            pieces = [memoryview(header), joined_bytes(list(tensors.values()))]
            pieces[-1] = pieces[-1][: len(pieces[-1]) - cut]
            client.tensors(TensorsRequest(**{**vars(request), **changes}), pieces)
            return sha256

        def asked(sha256: str | None) -> bytearray:
            request = BlocksRequest(run.run_id, (start, stop), 1, 4, False, sha256)
            return client.blocks(request, [joined_bytes([x])], x.nbytes)

        prompt = {f"transformer.h.{start}.prompt": np.ones((2, width), dtype=np.float32)}
        assert asked(give(prompt)) != asked(None)
        wrong: list[dict[str, tuple[int, ...]]] = [
            {f"transformer.h.{start - 1}.prompt": (2, width)}, {f"transformer.h.{start}.prompt": (2, width + 1)},
            {f"transformer.h.{start}.prompt": (2 * width,)}, {f"transformer.h.{start}.other": (2, width)},
            {"prompt": (2, width)},
            {f"transformer.h.{start}.prefix_key": (2, kv)}, {f"transformer.h.{start}.attn.qkv.1.0.a": (2, width)},
            {f"transformer.h.{start}.prompt": (2, width), f"transformer.h.{stop - 1}.prompt": (3, width)}
            if stop - 1 > start else {f"transformer.h.{start}.prompt": (5000, width)},
            {f"transformer.h.{start}.attn.qkv.1.0.a": (2, width), f"transformer.h.{start}.attn.qkv.1.0.b": (3, kv)},
        ]  # fmt: skip
        for shapes in wrong:
            with pytest.raises(ControlError) as e:
                give({name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()})
            assert e.value.status == 400, shapes
        other = hash_of({name: 2 * tensor for name, tensor in prompt.items()})
        more = {"header_bytes": len(header_of(prompt)) + prompt[f"transformer.h.{start}.prompt"].nbytes + 1}
        for cut, changes in ((4, {}), (0, {"sha256": other}), (0, more), (0, {"blocks": (start - 1, stop)})):
            with pytest.raises(ControlError) as e:
                give(prompt, cut, **changes)
            assert e.value.status == (409 if "blocks" in changes else 400), changes
        with pytest.raises(ControlError) as e:
            asked(other)
        assert e.value.code == "tensors" and len(asked(hash_of(prompt))) == x.nbytes, "and goes on"


def sent_for(tensors: dict[str, Any]) -> tuple[bytes, memoryview]:
    """A set of tensors as it travels."""
    return header_of(tensors), joined_bytes(list(tensors.values()))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """All messages with tensors or rows that go to nodes from now on."""
    found = list[Told]()
    open_message = ControlClient.open_message

    def recording(self: ControlClient, ask: str, args: dict[str, Any], n_bytes: int, timeout_s: float) -> Message:
        message, name = open_message(self, ask, args, n_bytes, timeout_s), self.node.name
        receive = message.receive
        if ask in ("tensors", "blocks"):
            found.append(Told(name, ask, args.get("sha256", ""), n_bytes, 0))

        def receiving(n_bytes: int, timeout_s: float) -> bytearray:
            data = receive(n_bytes, timeout_s)
            found.append(Told(name, "answer", "", 0, len(data)))
            return data

        monkeypatch.setattr(message, "receive", receiving)
        return message

    monkeypatch.setattr(ControlClient, "open_message", recording)
    return found


class Told(NamedTuple):
    """A message, or an answer with bytes."""

    node: str
    ask: str
    sha256: str
    sent: int
    received: int


@pytest.mark.parametrize("method", METHODS)
def test_a_step_sends_and_gets_the_bytes_of_the_documents(
    method: str, checkpoint: Path, tmp_path: Path, told: list[Told]
) -> None:
    """To each node its tensors once; rows three times, and two times back; gradients back with each part."""
    kind = TuningKind(method, 2, 4, EVERY, LENGTH)
    with secondaries(2, tmp_path) as nodes, Run(
        GivenNodes(cluster_of(nodes)), options_of(checkpoint, tmp_path), 20, n_texts=1
    ) as run:  # fmt: skip
        training = training_of(run, kind, 8)
        blocks_of_nodes = dict(zip(run.names, run.model.weights.blocks, strict=True))
        for seed in (1, 2):
            draw(training.named.values(), seed)
            told.clear()
            training.learn(range(5))
            found = {name: Bytes() for name in run.names[1:]}
            for one in told:
                before = found[one.node]
                found[one.node] = Bytes(before.sent + one.sent, before.received + one.received)
            tuned = new_tensors(kind, run.model.weights.config, 3, run.model.weights.source_of, embedding_of(run))
            tensors = arrays(tuned)
            lengths = sorted((len(one.ids) for one in training.examples[:5]), reverse=True)
            parts = [lengths[:3], lengths[3:]]
            rows = 4 * tiny_config().n_embd * sum(len(part) * (part[0] + tuned.n_rows) for part in parts)
            for name in run.names[1:]:
                start, stop = blocks_of_nodes[name]
                own = of_blocks(tensors, start, stop)
                learned = sum(tensor.nbytes for key, tensor in own.items() if is_learned(key))
                assert found[name] == Bytes(sum(map(len, sent_for(own))) + 3 * rows, 2 * rows + len(parts) * learned)
            assert training.last_bytes == Bytes(*map(sum, zip(*found.values(), strict=True)))


def test_a_node_keeps_the_tensors_that_were_used_last(checkpoint: Path, tmp_path: Path, told: list[Told]) -> None:
    """Two sets; it gets another one again when a question names it."""
    width = tiny_config().n_embd
    prompts = [{f"transformer.h.{N - 1}.prompt": torch.full((2, width), 0.1 * k)} for k in range(3)]
    hashes = [hash_of({name: one.numpy() for name, one in prompt.items()}) for prompt in prompts]
    with (
        secondaries(1, tmp_path) as nodes,
        Run(GivenNodes(cluster_of(nodes)), options_of(checkpoint, tmp_path), 20, n_texts=1) as run,
    ):
        x, blocks, other = torch.ones(1, 4, width), RingBlocks(run), RingBlocks(run)
        first = [blocks(x, prompts[k]) for k in (0, 1)]
        assert not torch.equal(*first) and torch.equal(blocks(x, prompts[0]), first[0])
        blocks(x, prompts[2])
        assert torch.equal(other(x, prompts[1]), first[1]) and torch.equal(blocks(x, prompts[0]), first[0])
        assert [one.sha256 for one in told if one.sha256] == [hashes[k] for k in (0, 1, 2, 1, 0)]
        asked, answered = (sum(one.ask == ask for one in told) for ask in ("blocks", "answer"))
        assert asked == answered + 1, "one question was refused"


WINDOW = {"weight_memory": WindowMemory(window=WindowOptions(1))}
NO_GRADIENTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "a node in torch": ({"dtype": "bfloat16"}, {}, {}, "secondary0 computes .*: "),
    "a node with a window": (WINDOW, {}, {}, "secondary0 computes .*window"),
    "a group": ({}, {"group": "g"}, {}, "nodes compute blocks together"),
    "a starter in torch": ({}, {}, {"dtype": "bfloat16"}, "starter computes .*: "),
    "a starter with a window": ({}, {}, WINDOW, "starter computes .*window"),
}


def no_gradients(error: MdiError) -> bool:
    return error.code == "kernels"


@pytest.mark.parametrize("case", NO_GRADIENTS)
def test_blocks_without_gradients_are_refused_before_weights_are_sent(
    case: str, checkpoint: Path, tmp_path: Path
) -> None:
    of_node, entry, options, words = NO_GRADIENTS[case]
    with secondaries(2 if entry else 1, tmp_path, **of_node) as nodes:
        source, asked = GivenNodes(cluster_of(nodes, **entry)), options_of(checkpoint, tmp_path, **options)
        with (
            pytest.raises(MdiError, match=words, check=no_gradients),
            Run(source, asked, 20, n_texts=1, gradients=True),
        ):
            pass
        assert not [*tmp_path.glob("cache*/*.safetensors")]
        with Run(source, asked, 20, n_texts=1) as run, pytest.raises(MdiError, check=no_gradients):
            RingBlocks(run)(torch.zeros(1, 1, tiny_config().n_embd))
        assert [*tmp_path.glob("cache*/*.safetensors")], "texts are generated over such nodes"


# The command


def finetune(checkpoint: Path, data: Path, out: Path, *flags: str) -> int:
    given = ("--ckpt", str(checkpoint), "--data", str(data), "--out", str(out), "--device", "cpu", "--dtype", "float32")
    own = ("--epochs", "4", "--batch-size", "2", "--lr", "0.02", "--sequence-length", "32", "--prompt-length", "3")
    return launch("finetune", [*given, *own, *flags])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    rows = [
        {"text": text, "label": text.split()[0]}
        for text in ("you are here", "who is it", "you were there", "who was it")
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("method, kind", [("lora", "LORA"), ("prefix", "PREFIX_TUNING")])
def test_what_was_learned_is_served_as_it_was_trained(
    method: str, kind: str, checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernels read the folder through --adapter, and compute the loss that torch had."""
    out = tmp_path / "out"
    assert finetune(checkpoint, data, out, "--method", method, "--lora-targets", ",".join(EVERY)) == 0
    said = capsys.readouterr().out
    assert f"--adapter {out} uses it" in said
    losses = [
        tuple(map(float, found)) for found in re.findall(r"loss ([\d.]+) in torch.*?, ([\d.]+) in the kernels", said)
    ]
    assert len(losses) == 2 and all(a == pytest.approx(b, abs=2e-4) for a, b in losses)
    assert losses[1][0] < (0.9 if method == "lora" else 1) * losses[0][0]
    told = json.loads((out / "adapter_config.json").read_text())
    assert told["peft_type"] == kind and (method != "lora" or (told["r"], told["lora_alpha"]) == (8, 16))
    assert "mdi_base" in read_header(out / "adapter_model.safetensors").metadata


@contextlib.contextmanager
def stopped_after_three_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command that trains gets SIGTERM in its third step."""
    step = RingTraining.step

    def step_and_stop(self: RingTraining) -> float:
        loss = step(self)
        if self.n_steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(RingTraining, "step", step_and_stop)
        yield


@pytest.mark.slow
def test_what_was_interrupted_goes_on_to_the_same_bits(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert finetune(checkpoint, data, whole, "--method", "deep-prompt") == 0
    with stopped_after_three_steps(monkeypatch):
        assert finetune(checkpoint, data, out, "--method", "deep-prompt") == 128 + signal.SIGTERM
    assert len((out / "losses.csv").read_text().split()) == 1 + 3
    assert finetune(checkpoint, data, out, "--method", "deep-prompt") == 2, "it is there, and not meant to be replaced"
    assert finetune(checkpoint, data, out, "--method", "deep-prompt", "--resume") == 0
    for name in ("losses.csv", "adapter_model.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert not (out / "work").exists()


class Summing(Tuning):
    """One number is learned, whose gradient is always 1."""

    def learn(self, indices: Sequence[int]) -> float:
        (parameter,) = self.named.values()
        parameter.grad = torch.ones_like(parameter)
        return 1.0

    def sums(self, indices: Sequence[int]) -> Iterator[Sum]:
        raise AssertionError("nothing is evaluated")


ROWS = [Example(tuple(range(n)), 0, tuple(range(n))) for n in (1, 2, 4, 8)]


def summing(
    settings: TuningSettings, examples: Sequence[Example] = ROWS, n_train: int = 4, base: str = "that", **facts: str
) -> Summing:
    return Summing({"a": torch.nn.Parameter(torch.zeros(1))}, examples, n_train, settings, facts, base)


def test_the_rate_of_learning_rises_and_then_falls_to_nothing() -> None:
    one = summing(TuningSettings(10, 1, 0.001, 1))
    found = [0.0]
    for _ in range(one.n_all):
        one.step()
        found.append(-one.named["a"].item())
    wanted = [0.001 * min(1, (k + 1) / 2) * (1 - k / 40) for k in range(40)]
    assert np.diff(found) == pytest.approx(wanted, rel=0.02), "with a gradient of 1 a step is as long as the rate"


def test_a_state_is_gone_on_with_over_the_same_examples_and_the_same_model_alone(tmp_path: Path) -> None:
    settings = TuningSettings(3, 1, 0.1, 1)
    one = summing(settings)
    one.step()
    one.save(tmp_path)
    other = summing(settings)
    assert other.restore(tmp_path) and other.n_steps == 1
    anew = summing(replace(settings, lr=0.2)), summing(settings, method="prompt")
    assert not any(another.restore(tmp_path) for another in anew), "the same sources with other settings begin again"
    for different in (
        summing(settings, ROWS[:3], 3), summing(settings, [*ROWS[:3], ROWS[0]]), summing(settings, n_train=3),
        summing(settings, base="another"), summing(replace(settings, lr=0.2), base="another"),
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            different.restore(tmp_path)
        assert str(tmp_path) in str(caught.value) and "--out" in str(caught.value)
        assert caught.value.code == "exists" and not different.n_steps and not different.named["a"].item()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_while_the_state_is_written_leaves_what_is_needed_to_go_on(when: str, tmp_path: Path) -> None:
    settings, losses = TuningSettings(3, 1, 0.1, 1), tmp_path / "losses.csv"

    class Killed(Summing):
        def save(self, folder: Path) -> None:
            if when == "after" or self.n_steps < 8:
                super().save(folder)
            if when == "after" or self.n_steps == 8:
                raise KeyboardInterrupt

    one = Killed({"a": torch.nn.Parameter(torch.zeros(1))}, ROWS, 4, settings, {}, "that")
    with pytest.raises(KeyboardInterrupt):
        train(one, tmp_path, losses, lambda: False, lambda line: None)
    for n in (4, 12):
        other = summing(settings)
        assert other.restore(tmp_path) and other.n_steps == n
        assert train(other, tmp_path, losses, lambda: False, lambda line: None).is_done
        rows = losses.read_text().split()
        assert [row.split(",")[0] for row in rows] == ["step", *map(str, range(1, 13))]
    losses.unlink()
    other = summing(replace(settings))
    assert other.restore(tmp_path) and train(other, tmp_path, losses, lambda: False, lambda line: None).is_done


def test_a_part_of_a_step_has_no_more_rows_than_a_node_may_get_at_once() -> None:
    n_rows: list[int] = []
    kind = TuningKind("prompt", length=5)
    named = {"a": torch.nn.Parameter(torch.zeros(1))}

    def loss(part: Sequence[Example], tensors: object) -> Sum:
        n_rows.append(len(part) * (5 + max(len(one.ids) for one in part)))
        return Sum(torch.zeros(()), len(part))

    model: Any = SimpleNamespace(
        tuned=SimpleNamespace(kind=kind, named=named, n_rows=5), learned=lambda: [*named.values()], loss=loss
    )
    lengths = [300, 40, 1500, 300, 40, 200, 300, 300]
    examples = [Example(tuple(range(n)), 0, tuple(range(n))) for n in lengths]
    training = RingTraining(model, examples, 8, TuningSettings(1, 8, 0.1, 1), 2)
    assert sum(found.n_right for found in training.sums(range(8))) == 8
    assert sorted(n > PART_ROWS for n in n_rows) == [False] * (len(n_rows) - 1) + [True], "but for a single text"
    assert max(n_rows) == 1505 and len(n_rows) == 4


def test_the_rate_is_that_of_the_steps_alone(tmp_path: Path) -> None:
    """By a clock that only work moves: a step takes 2 s, what else is done takes 100 s."""
    now, seconds = [0.0], {"learn": 2.0, "other": 100.0}
    rows = [Example(tuple(range(n)), 0, tuple(range(n))) for n in (1, 2, 4, 8)]

    class Counted(Tuning):
        def learn(self, indices: Sequence[int]) -> float:
            now[0] += seconds["learn"]
            return 1.0

        def sums(self, indices: Sequence[int]) -> Iterator[Sum]:
            raise AssertionError("train evaluates nothing")

        def save(self, folder: Path) -> None:
            now[0] += seconds["other"]
            super().save(folder)

    def made() -> Counted:
        return Counted({"a": torch.nn.Parameter(torch.zeros(1))}, rows, 4, TuningSettings(3, 1, 0.1, 1), {})

    def trained(one: Counted, n_stop: int) -> Steps:
        found = train(
            one, tmp_path, tmp_path / "losses.csv", lambda: one.n_steps == n_stop, lambda line: None,
            clock=lambda: now[0],
        )  # fmt: skip
        assert found.seconds == 2.0 * (min(n_stop, 12) - begun) and found.is_done == (n_stop >= 12)
        return found

    begun = 0
    first = trained(one := made(), 5)
    assert first.n_tokens == one.n_tokens and 15 < first.n_tokens < 30 and first.tokens_per_s == first.n_tokens / 10
    other = made()
    assert other.restore(tmp_path) and other.n_steps == 5
    begun = 5
    assert trained(other, 99).n_tokens == 3 * 15 - first.n_tokens, "tokens of steps before are not counted"
    begun = 12
    assert trained(other, 12 + 99).tokens_per_s is None


def test_the_command_prints_the_rate_of_its_own_steps(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when it goes on after an interruption."""
    found = list[Steps]()

    def in_four_seconds(training: Tuning, *arguments: Any) -> Steps:
        steps = train(training, *arguments)
        found.append(Steps(steps.is_done, steps.n_tokens, 4.0))
        return found[-1]

    monkeypatch.setattr("mdi_training.tuning.train", in_four_seconds)
    flags = ("--method", "prompt")
    assert finetune(checkpoint, data, tmp_path / "whole", *flags) == 0
    said = capsys.readouterr().out
    n_all = found[-1].n_tokens
    assert f"{n_all / 4:,.1f} tokens/s forward" in said and n_all % 4 == 0, "four passes"
    with stopped_after_three_steps(monkeypatch):
        assert finetune(checkpoint, data, tmp_path / "out", *flags) == 128 + signal.SIGTERM
    n_first = found[-1].n_tokens
    assert "tokens/s" not in capsys.readouterr().out and 0 < n_first < n_all
    assert finetune(checkpoint, data, tmp_path / "out", *flags, "--resume") == 0
    assert f"{(n_all - n_first) / 4:,.1f} tokens/s forward" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["lora", "prefix"])
def test_classes_are_learned_and_told_apart(
    method: str, checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert finetune(checkpoint, data, out, "--method", method, "--head", "classes", "--epochs", "10") == 0
    assert "100.0% right" in capsys.readouterr().out.split("after:")[1]
    flags = (
        "--ckpt",
        str(checkpoint),
        "--predict",
        str(data),
        "--out",
        str(out),
        "--device",
        "cpu",
        "--dtype",
        "float32",
    )
    assert launch("finetune", list(flags)) == 0
    labels = [json.loads(line)["label"] for line in capsys.readouterr().out.split("\n") if line.startswith("{")]
    assert labels == ["you", "who", "you", "who"]


def test_classes_that_are_learned_in_one_format_are_told_apart_in_others(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt = tiny_gpt(n_layer=N)
    torch.nn.init.uniform_(gpt.transformer.ln_f.weight, -2, 2, generator=torch.Generator().manual_seed(1))
    checkpoint = write_checkpoint(tmp_path / "tiny", gpt=gpt, with_end=False)
    out, found = tmp_path / "out", {}
    flags = ("--method", "lora", "--head", "classes", "--epochs", "3", "--quantize", "int8", "--quantize-head", "int8")
    assert finetune(checkpoint, data, out, *flags) == 0
    for form in ("int8", "float32"):
        capsys.readouterr()
        given = ["--ckpt", str(checkpoint), "--predict", str(data), "--out", str(out), "--device", "cpu"]
        assert launch("finetune", [*given, "--quantize", form, "--quantize-head", form]) == 0
        told = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line.startswith("{")]
        found[form] = [one["probability"] for one in told]
    assert found["float32"] == pytest.approx(found["int8"], abs=0.02), "the classes' rows have the norm's gains"


@pytest.mark.parametrize("method", METHODS)
def test_what_was_written_is_read_again(method: str, tmp_path: Path) -> None:
    config = tiny_config(n_layer=N)
    tuned = drawn(TuningKind(method, 2, 4, EVERY, LENGTH, ("a", "b")), config)
    tuned.write(tmp_path, "tiny", None)
    found = read_tensors(tmp_path, ModelConfig.from_litgpt(config), lambda part: NoNorms())
    assert found.kind == tuned.kind
    for name, parameter in tuned.named.items():
        assert torch.equal(found.named[name], parameter)
    told = json.loads((tmp_path / "adapter_config.json").read_text())
    assert told["task_type"] == "SEQ_CLS"
    header = read_header(tmp_path / "adapter_model.safetensors")
    score = "base_model.model.score.weight" if method == "lora" else "base_model.score.weight"  # as peft looks for it
    assert header.specs[score].shape == (2, config.n_embd)
    if method == "prefix":  # key and value of each block, one block after the other
        width = config.n_query_groups * config.head_size
        assert header.specs["prompt_embeddings"].shape == (LENGTH, 2 * N * width)
        assert (told["num_attention_heads"], told["token_dim"]) == (config.n_query_groups, width)


@pytest.mark.parametrize(
    "family", ["Llama-3.1-8B", "pythia-14m", "falcon-7b", "phi-2", "Phi-3-mini-4k-instruct", "Gemma-2-9b", "Qwen3-0.6B"]
)
def test_the_folder_of_lora_is_what_the_nodes_had(family: str, tmp_path: Path) -> None:
    """As --adapter reads it, by the names of transformers' modules."""
    config = ModelConfig.from_litgpt(config_of(family))
    tuned = drawn(TuningKind("lora", 2, 5, EVERY), config_of(family))
    tuned.write(tmp_path, family, None)
    read = open_adapter(AdapterName("own", tmp_path), 1, config, lambda: None)
    found = {name: array for i in range(config.n_layer) for name, array in read.arrays(i).items()}
    had = arrays(tuned)
    assert found.keys() == had.keys() and len(found) >= 8 * config.n_layer
    for name in found:
        np.testing.assert_allclose(found[name], had[name], rtol=1e-6)


def test_a_step_of_lora_takes_what_the_documents_say() -> None:
    """r = 8 on queries and values of 32 blocks with 4,096 numbers in a row."""
    config = config_of(
        "Llama-2-7b-hf", n_layer=32, n_embd=4096, n_head=32, n_query_groups=32, head_size=128, intermediate_size=11008
    )
    for method, expected in (
        ("lora", 4_194_304),
        ("deep-prompt", 31 * 16 * 4096),
        ("prefix", 4_194_304),
        ("prompt", 0),
    ):
        assert n_numbers(drawn(TuningKind(method), config).of_blocks().values()) == expected
    lora = Lora(TuningKind("lora"), ModelConfig.from_litgpt(config), 1, lambda norm: np.ones(4096, dtype=np.float32))
    assert n_numbers([one for name, one in lora.of_blocks().items() if name.endswith(".gain")]) == 131_072


@pytest.mark.parametrize(
    ("family", "kind", "word"),
    [
        ("Mixtral-8x7B-v0.1", TuningKind("lora", targets=("mlp",)), "experts"),
        ("Gemma-2-9b", TuningKind("prompt"), "embeddings"),
        ("Gemma-2-9b", TuningKind("prefix"), "windows"),
    ],
)
def test_what_a_model_cannot_have_is_refused_by_name(family: str, kind: TuningKind, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        drawn(kind, config_of(family))


def test_what_cannot_be_learned_is_refused_before_a_node_is_asked(
    checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_run(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the run began")

    monkeypatch.setattr(Run, "open", no_run)
    other = write_checkpoint(tmp_path / "other", n_layer=1)
    assert finetune(other, data, tmp_path / "out", "--method", "lora", "--lora-targets", "head") == 2
    assert "--lora-targets head" in capsys.readouterr().err
    assert finetune(other, data, tmp_path / "out", "--method", "prompt", "--prompt-length", "4000") == 2
    assert "--prompt-length" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "method, name", [("lora", "base_model.model.score.weight"), ("prompt", "base_model.score.weight"),
                     ("prefix", "base_model.score.weight")],
)  # fmt: skip
def test_classes_have_the_name_under_which_peft_looks_for_them(method: str, name: str, tmp_path: Path) -> None:
    config = ModelConfig.from_litgpt(tiny_config(n_layer=N))
    made = drawn(TuningKind(method, labels=("a", "b")), tiny_config(n_layer=N))
    path = made.write(tmp_path, "it", None)
    assert [one for one in read_header(path).specs if "score" in one] == [name]
    read = read_tensors(tmp_path, config, lambda part: NoNorms())
    assert all(torch.equal(one, made.named[key]) for key, one in read.named.items())


STRANGE: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], str]] = {
    "a rank beyond memory": ({"rank": 1 << 40}, {}, "rank"),
    "rows beyond memory": ({"length": 1 << 40}, {}, "length"),
    "labels beyond memory": ({"labels": ["a"] * 100_000}, {}, "labels"),
    "side": ({"method": "side"}, {}, "none of `mdi finetune`"),
    "a path": ({"method": "../up"}, {}, "none of `mdi finetune`"),
    "the head": ({"method": "lora", "targets": ["head"]}, {}, "none of `mdi finetune`"),
    "a row that would be all rows": ({}, {"prompt_embeddings": (1, 48)}, "not those of its description"),
    "another tensor": ({}, {"transformer.wte.weight": (1, 48)}, "not those of its description"),
    "other weights": ({}, {}, "trained on other weights"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_what_a_stranger_has_learned_is_checked(case: str, tmp_path: Path) -> None:
    """Before memory is taken: `--predict` reads a folder's classes."""
    description, shapes, words = STRANGE[case]
    config = ModelConfig.from_litgpt(tiny_config(n_layer=N))
    path = drawn(TuningKind("prompt", length=4, labels=("a", "b")), tiny_config(n_layer=N)).write(
        tmp_path, "it", "1" * 64
    )
    header, tensors = read_header(path), load_file(path)
    told = {**json.loads(header.metadata[KEY]), **description}
    tensors |= {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}
    save_file(tensors, path, {**header.metadata, KEY: json.dumps(told)})
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=words):
            read_tensors(tmp_path, config, lambda part: NoNorms(), "2" * 64 if case == "other weights" else "1" * 64)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_numbers_that_are_not_finite_are_not_used(tmp_path: Path) -> None:
    made = drawn(TuningKind("prompt", length=4, labels=("a", "b")), tiny_config(n_layer=N))
    made.named["prompt_embeddings"].data[2, 3] = float("nan")
    made.write(tmp_path, "it", None)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path)) + ".* has numbers"):
        read_tensors(tmp_path, ModelConfig.from_litgpt(tiny_config(n_layer=N)), lambda part: NoNorms())
