"""Models with gated delta nets, as they are published, give transformers' logits at every position, over one node and three;
their states go through what happens to sequences.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from made_up_rings import MAX_LENGTH, N_TOKENS, Ring, Source, prompt
from mdi.checkpoint.convert import convert
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.export import export_hf
from mdi.checkpoint.gguf import read_gguf
from mdi.checkpoint.gguf_export import export_gguf
from mdi.checkpoint.ggufsource import GgufSource
from mdi.checkpoint.hffolder import HfFolder
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.shapes import shapes_of
from mdi.checkpoint.source import open_source
from mdi.checkpoint.weights import WeightSource
from mdi.engine.kept_prefixes import KeptFiles, Secrets
from mdi.engine.memory import page_keys
from mdi.engine.prefix_tasks import FILL, FIND, KEEP, PrefixTask
from mdi.engine.rows import ArrayRows
from mdi.errors import CheckpointError, EngineError, RingError
from mdi.families.registry import FAMILIES
from mdi.kernels import library
from mdi.kernels.slices import Slices
from mdi.kernels.states import StateStore
from mdi.model.caches import PAGE, SLACK, StateClass
from mdi.model.plain import ModelConfig, spec_of
from mdi.placement.model import model_shape
from mdi.spec.cluster import standalone
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.store import CacheReport
from mdi.stages.torch_stage import Stage, StarterStage
from references.float64_delta_net import Model
from references.test_exported import PROGRAM
from references.test_references import generated
from references.write_delta_nets import CASES, version
from secondaries import cluster_of, secondaries
from tiny_checkpoint import tokenizer

FOLDER = Path(__file__).parents[2] / ".venv-references" / "delta"
TOLERANCE = 1e-4  # transformers takes in a prompt in another form, in pieces of 64
IN_STEPS = {"torch": 3e-5, "kernels": 6e-5}
# Models whose rounding is compared with transformers' beside float64, and how many times as large it may be: two float32 differ
# by what both are wrong.
IN_FLOAT64 = {"qwen3_5": 1.5, "qwen3_5_moe": 2.5}
FRAMES = (20, 1, 1, 37)


def _is_written() -> bool:
    written = FOLDER / "version.txt"
    return written.is_file() and written.read_text(encoding="utf-8") == version()


pytestmark = pytest.mark.skipif(not _is_written(), reason="no models of transformers: make references")
AnyStage = Stage | KernelStage


@pytest.fixture(params=["torch", "kernels"])
def computing(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if found == "kernels" and library.load() is None:
        pytest.skip(f"no kernels: {library.why_not()}")
    return found


def folder_of(name: str, tmp_path: Path) -> tuple[Path, list[int], np.ndarray]:
    """A copy of the model's folder with a tokenizer, the ids of the text, and transformers' logits (ids, vocabulary)."""
    folder = tmp_path / "hf" / name
    shutil.copytree(FOLDER / name, folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder, json.loads((folder / "ids.json").read_text(encoding="utf-8")), np.load(folder / "logits.npy")


def stages_of(
    source: WeightSource,
    bounds: Sequence[int],
    max_length: int,
    config: ModelConfig | None = None,
    computing: str = "torch",
) -> list[AnyStage]:
    spec, cpu, stages = spec_of(config or source.config), torch.device("cpu"), list[AnyStage]()
    for node, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if computing == "kernels":
            weights = Resident(stage_parts(start, stop, starter=node == 0), source.weights)
            stages.append(own := KernelStage(spec, start, stop, weights))
            own.prepare(max_length)
            continue
        stage = StarterStage(spec, stop) if node == 0 else Stage(spec, start, stop)
        stage.load(stage_parts(start, stop, starter=node == 0), source.tensors, cpu, torch.float32)
        stage.prepare(max_length, cpu, torch.float32)
        stages.append(stage)
    return stages


def rows_of(stages: Sequence[AnyStage], ids: Sequence[int], start: int = 0, seq_id: int = 0) -> np.ndarray:
    """Logits behind each of some ids, from one frame."""
    first, slices = stages[0], [(seq_id, start, len(ids), len(ids))]
    if isinstance(first, KernelStage):
        rows = first.embed(np.array(ids), slices)
        for one in stages:
            rows = one(rows, slices)
        return first.head(rows)
    assert isinstance(first, StarterStage)
    x = first.embed(torch.tensor(ids), slices)  # type: ignore[arg-type]
    for stage in stages:
        x = stage(x, slices)
    found: np.ndarray = first.head(x).numpy()
    return found


def logits_of(stages: Sequence[AnyStage], ids: list[int], frames: Sequence[int] = FRAMES) -> np.ndarray:
    found, start = list[np.ndarray](), 0
    while start < len(ids):
        n = min(frames[len(found) % len(frames)], len(ids) - start)
        found.append(rows_of(stages, ids[start : start + n], start))
        start += n
    return np.concatenate(found)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, computing: str, tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    source = open_source(folder)
    n_layer = source.config.n_layer

    def found_by(source: WeightSource, cuts: Sequence[int] = (), frames: Sequence[int] = FRAMES) -> np.ndarray:
        stages = stages_of(source, [0, *cuts, n_layer], len(ids), computing=computing)
        return logits_of(stages, ids, frames)

    found = found_by(source)
    assert np.abs(found - expected).max() < TOLERANCE and np.ptp(expected) > 5
    assert np.array_equal(found_by(source, (1, 2)), found)
    steps = found_by(source, frames=(1,))
    if name not in IN_FLOAT64:
        assert np.abs(steps - np.load(folder / "steps.npy")).max() < IN_STEPS[computing]
    if computing == "kernels":
        assert np.array_equal(steps, found)
    (made := tmp_path / "made").mkdir()
    convert(folder, target=made, progress=False)
    again = open_source(made)
    assert again.config == source.config and not any("mtp" in key or "visual" in key for key in again.specs)
    assert all(np.array_equal(np.array(again.array(key)), np.array(source.array(key))) for key in again.specs)
    if computing == "kernels":
        assert np.array_equal(found_by(again), found)
    else:  # torch's products depend on where in memory a matrix begins, on some processors
        assert np.abs(found_by(again) - found).max() < TOLERANCE


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_rounding_is_as_large_as_that_of_transformers(name: str, computing: str, tmp_path: Path) -> None:
    """Beside float64. transformers' float32 is 1.4e-5 away in steps of one token and 4.3e-5 in a prompt, so that no float32 can
    be within 1e-5 of either but by the same order of sums; torch here is 2.1e-5 away, the kernels 3.4e-5 (AVX2).
    """
    folder, ids, prompt_logits = folder_of(name, tmp_path)
    exact = Model(folder).logits(ids)
    source = open_source(folder)
    stages = stages_of(source, [0, source.config.n_layer], len(ids), computing=computing)

    def away(found: np.ndarray) -> tuple[float, float]:
        """Most, and root mean square."""
        return float(np.abs(found - exact).max()), float(np.sqrt(((found - exact) ** 2).mean()))

    steps, prompt, own = away(np.load(folder / "steps.npy")), away(prompt_logits), away(logits_of(stages, ids, (1,)))
    assert steps[0] < prompt[0] < 1e-4 and (name != "qwen3_5" or steps[0] > 1e-5)
    assert own[0] < IN_FLOAT64[name] * prompt[0] and own[1] < IN_FLOAT64[name] * prompt[1]


@pytest.mark.parametrize("name", CASES)
def test_a_ring_of_three_continues_a_text_as_one_node_and_as_transformers_begins(name: str, tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    alone = generated(standalone(), folder, ids[:140], 6)
    best = np.sort(expected[139])[-2:]
    assert alone[0][0] == expected[139].argmax() and best[1] - best[0] > 2 * TOLERANCE
    with secondaries(2, tmp_path) as nodes:
        assert generated(cluster_of(nodes), folder, ids[:140], 6) == alone


NET = {"n_head": 6, "n_groups": 2, "k_size": 16, "v_size": 32, "n_taps": 4}
Change = Callable[[np.ndarray], np.ndarray]


def _exp(a: np.ndarray) -> np.ndarray:
    return -np.exp(a)


# A feature -> settings of a model without it, or its tensors and what becomes of their numbers.
LEFT_OUT: dict[str, dict[str, object] | tuple[str, Change]] = {
    "gates of attention": {"attention_gate": False},
    "one beside weights of norms": {"norm_unit_offset": False},
    "partial rotation": {"rotary_percentage": 1.0},
    "norms of queries and keys": {"norm_qk": False},
    "which values a key serves": {"delta_net": {**NET, "blocks": (1, 0, 1, 1, 0), "is_in_turn": True}},
    "rows before the present one": (r"delta\.conv\.weight", lambda a: a * (np.arange(4) == 3)),
    "the oldest row of the convolution": (r"delta\.conv\.weight", lambda a: a * (np.arange(4) != 0)),
    "the bias of steps": (r"delta\.dt_bias", np.zeros_like),
    "decays": (r"delta\.A_log", lambda a: np.full_like(a, -30)),
    "the logarithm of decays": (r"delta\.A_log", _exp),
    "the gates b and a, each of its own": (r"delta\.gates\.weight", lambda a: np.roll(a, 6, axis=0)),
    "what gates heads of states": (r"delta\.out_gate\.weight", np.zeros_like),
    "weights of the norm of states": (r"delta\.norm\.weight", np.ones_like),
    "no offset of that norm": (r"delta\.norm\.weight", lambda a: a + 1),
    "the order of gates and queries": (r"attn\.out_gate\.weight", lambda a: np.roll(a, 32, axis=0)),
}
OF_EXPERTS: dict[str, dict[str, object] | tuple[str, Change]] = {
    "the gate of the shared expert": {"shared_expert_gate": False},
    "weights of that gate": (r"shared_experts\.gate\.weight", np.zeros_like),
    "the shared expert": (r"shared_experts\.proj\.weight", np.zeros_like),
    "which half of experts is the gate": (r"experts\.\d\.fc_1\.weight", lambda a: -a),
}


@pytest.mark.parametrize(
    ("name", "feature"),
    [("qwen3_5", one) for one in LEFT_OUT]
    + [(name, one) for name in ("qwen3_5_moe", "qwen3_next") for one in OF_EXPERTS],
)
def test_what_these_families_have_matters(name: str, feature: str, tmp_path: Path) -> None:
    folder, ids, expected = folder_of(name, tmp_path)
    source, without = open_source(folder), (LEFT_OUT | OF_EXPERTS)[feature]
    config, plain = source.config, source.tensors
    if isinstance(without, dict):
        config = replace(config, **without)  # type: ignore[arg-type]
    wanted = {f"transformer.h.{i}.{key}" for i, one in enumerate(spec_of(config).blocks) for key in tensors_of(one)}

    def changed(part: str) -> dict[str, torch.Tensor]:
        found = {key: one for key, one in plain(part).items() if key in wanted or not key.startswith("transformer.h.")}
        for key in found:
            if isinstance(without, tuple) and re.search(without[0], key):
                found[key] = torch.from_numpy(np.ascontiguousarray(without[1](found[key].numpy())))
        return found

    source.tensors = changed  # type: ignore[method-assign]
    found = logits_of(stages_of(source, [0, config.n_layer], len(ids), config), ids[:60])
    assert (np.abs(found - expected[:60]).max(axis=1) > 10 * TOLERANCE).mean() > 0.5


def tensors_of(block: object) -> list[str]:
    from mdi.model.spec import BlockSpec
    from mdi.model.tensors import block_tensors

    assert isinstance(block, BlockSpec)
    return list(block_tensors(block, 48))


def test_experts_in_files_of_their_own_are_the_same(tmp_path: Path) -> None:
    folder, ids, expected = folder_of("qwen3_5_moe", tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key in [key for key in tensors if key.endswith("experts.gate_up_proj")]:
        stem = key.removesuffix("gate_up_proj")
        both, down = tensors.pop(key), tensors.pop(stem + "down_proj")
        for i in range(6):
            gate, up = both[i].chunk(2)
            own = {"gate_proj": gate, "up_proj": up, "down_proj": down[i]}
            tensors |= {f"{stem}{i}.{module}.weight": one.contiguous() for module, one in own.items()}
    save_file(tensors, path)
    source = open_source(folder)
    assert np.abs(logits_of(stages_of(source, [0, 5], len(ids)), ids) - expected).max() < TOLERANCE


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"), ({"attn_output_gate": False}, "attn_output_gate"),
        ({"linear_num_key_heads": 4}, "delta_net"), ({"shared_expert_intermediate_size": 33}, "a shared expert of 33"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
    ],
)  # fmt: skip
def test_what_nothing_here_computes_is_refused(settings: dict[str, object], reason: str, tmp_path: Path) -> None:
    folder, _, _ = folder_of("qwen3_5_moe", tmp_path)
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hf["text_config"] |= settings
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    with pytest.raises(CheckpointError, match=reason):
        open_source(folder)


@pytest.mark.slow
def test_exported_models_have_the_same_logits_in_transformers(tmp_path: Path, transformers: Callable[..., str]) -> None:
    outs = []
    for name in CASES:
        source = open_source(folder_of(name, tmp_path)[0])
        assert isinstance(source, HfFolder)
        export_hf(source, tmp_path, out := tmp_path / name)
        shutil.copy(FOLDER / name / "ids.json", out)
        outs.append(str(out))
    transformers(PROGRAM, *outs)
    for name in CASES:
        expected = np.load(FOLDER / name / "logits.npy")
        assert np.abs(np.load(tmp_path / name / "found.npy") - expected).max() < TOLERANCE, name


# Sequences that are cut, copied, moved to another node and freed have the rows of texts that were computed alone.
CLOSE = {"torch": 2e-4, "kernels": 0.0}


class Texts:
    """Logits of texts computed alone, one after the other."""

    def __init__(self, source: WeightSource, computing: str) -> None:
        self._stages = stages_of(source, [0, source.config.n_layer], 400, computing=computing)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        found = [rows_of(self._stages, ids[at : at + 50], at) for at in range(0, len(ids), 50)]
        for stage in self._stages:
            stage.caches.clear()
        return np.concatenate(found)


@pytest.mark.parametrize("seed", range(3))
def test_states_follow_their_sequences(seed: int, computing: str) -> None:
    source, rng = open_source(FOLDER / "qwen3_5"), random.Random(seed)
    stages, other = (stages_of(source, [0, 3, 5], 400, computing=computing) for _ in range(2))
    alone, texts, far = Texts(source, computing), dict[int, list[int]](), dict[int, int]()
    done = set()
    for _ in range(40):
        seq_id = rng.randrange(3)
        text = texts.get(seq_id, [])
        what = rng.choice(["more", "more", "more", "back", "copy", "move", "free"])
        if what == "free":
            for stage in stages:
                stage.caches.free(seq_id)
            texts.pop(seq_id, None)
        elif what == "copy" and text:
            for stage in stages:
                stage.caches.rearrange([], [(seq_id, 3 - seq_id)])
            texts[3 - seq_id], far[3 - seq_id] = [*text], far[seq_id]
        elif what == "move" and text:
            for here, there in zip(stages, other, strict=True):
                there.caches.fill(7, here.caches.export(seq_id, 0, len(text)))
                here.caches.free(seq_id)
                here.caches.fill(seq_id, there.caches.export(7, 0, len(text)))
        elif what in ("more", "back") and len(text) < 250:
            start = len(text)
            if what == "back" and text:
                start = rng.randint(max(0, far[seq_id] - SLACK), len(text))
            new = [rng.randrange(1, 320) for _ in range(rng.choice([1, 1, 2, 30, 64]))]
            found = rows_of(stages, new, start, seq_id)
            texts[seq_id] = [*text[:start], *new]
            far[seq_id] = max(far.get(seq_id, 0) if text else 0, start)
            expected = alone.logits(texts[seq_id])[start:]
            assert np.abs(found - expected).max() <= CLOSE[computing], (what, start, len(new))
            done.add((what, start < len(text)))
    assert {("more", False), ("back", True)} <= done


class Node:
    """A stage whose rows are arrays."""

    is_head_shared, rows = False, ArrayRows()

    def __init__(self, source: WeightSource, start: int, stop: int, computing: str) -> None:
        bounds = [start, stop] if start == 0 else [0, start, stop]
        self.inner = stages_of(source, bounds, MAX_LENGTH, computing=computing)[-1]
        self.row_in, self.row_out = self.inner.row_in, self.inner.row_out
        self.returned_width = spec_of(source.config).width
        self.caches, self.classes = self.inner.caches, tuple(self.inner.caches.classes)

    def embed(self, ids: np.ndarray, slices: Slices) -> np.ndarray:
        return _array(self.inner.embed(self._given(np.array(ids)), slices))  # type: ignore[union-attr]

    def head(self, x: np.ndarray) -> np.ndarray:
        return _array(self.inner.head(self._given(np.array(x))))  # type: ignore[union-attr]

    def __call__(self, x: np.ndarray, slices: Slices, taps: Sequence[int] = ()) -> np.ndarray:
        return _array(self.inner(self._given(np.array(x)), slices))

    def _given(self, x: np.ndarray) -> Any:
        return x if isinstance(self.inner, KernelStage) else torch.from_numpy(x)


def _array(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else np.array(x.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["none", "link", "0", "all"])
def test_tokens_of_a_ring_with_guesses_forks_prefixes_and_losses(loss: str, computing: str) -> None:
    source = open_source(FOLDER / "qwen3_5")
    prompts = [prompt(70, 1), prompt(70, 1), prompt(3, 2), prompt(150, 3)]
    stages = stages_of(source, [0, 5], MAX_LENGTH, computing=computing)

    def alone(ids: list[int]) -> list[int]:
        text = [*ids]
        for at in range(N_TOKENS):
            row = rows_of(stages, text[-1:] if at else text, len(text) - 1 if at else 0)[-1]
            best = np.sort(row)[-2:]
            assert best[1] - best[0] > 1e-3
            text.append(int(row.argmax()))
        stages[0].caches.clear()
        return text[len(ids) :]

    expected = [alone(ids) for ids in prompts]
    after = [*prompts[3], *expected[3], 7, 8]
    truth = [*expected, alone(after)]
    ring = Ring(lambda start, stop: Node(source, start, stop, computing), (0, 1, 3, 5))
    ring.engine.speculation = Source(dict(enumerate(truth)))  # type: ignore[assignment]
    texts = [ring.submit(ids, 20 if i == 3 and loss != "none" else None, owner="a") for i, ids in enumerate(prompts)]
    if loss != "none":
        with ring.closed() as run, pytest.raises(RingError):
            run()
        ring.come_back(loss)
    with ring.closed() as run:
        run()
        assert [text.ids for text in texts] == expected
        assert ring.engine.n_reused >= 69 and ring.engine.scheduler.n_guessed > 20
        before = ring.engine.n_reused
        text = ring.submit(after, owner="a")
        run()
        assert ring.engine.n_reused - before == 150 + N_TOKENS - 1, "behind the answer"
        assert text.ids == truth[4]


def test_states_take_the_memory_that_was_counted_and_go_back_as_far_as_they_say(computing: str) -> None:
    source = open_source(FOLDER / "qwen3_5")
    stages = stages_of(source, [0, 5], 400, computing=computing)
    store, (kind,) = stages[0].caches.stores[-1], [c for c in stages[0].caches.classes if isinstance(c, StateClass)]
    assert isinstance(store, StateStore)
    ids = [5] * 300
    for start in [*range(0, 192, 64), *range(192, 300)]:
        rows_of(stages, ids[start : start + (64 if start < 192 else 1)], start)
        end = min(300, start + 64 if start < 192 else start + 1)
        assert store.n_bytes <= kind.n_bytes(end)
        assert kind.cut_to(start, max(0, start - SLACK)) == max(0, start - SLACK)
        store.check(stages[0].caches.entries(0)[-1], max(0, start - SLACK))
    n_bytes = store.n_bytes
    stages[0].caches.rearrange([], [(0, 1), (0, 2)])
    assert store.n_bytes == n_bytes, "copies share a state"
    rows_of(stages, [7], 299 - SLACK, 1)
    assert store.n_bytes == 2 * n_bytes, "until one of them writes"
    with pytest.raises(EngineError, match="goes back to position 150"):
        rows_of(stages, [7], 150, 2)
    assert kind.cut_to(299, 150) == 0
    store.most_bytes = n_bytes
    with pytest.raises(EngineError, check=lambda e: e.code == "memory"):
        rows_of(stages, [7], 299, 2)
    for seq_id in range(3):
        stages[0].caches.free(seq_id)
    assert store.n_bytes == 0


def test_a_node_reports_what_states_take() -> None:
    classes = tuple(stages_of(open_source(FOLDER / "qwen3_5"), [0, 5], 10)[0].caches.classes)
    report = CacheReport(1000, False, classes, "cpu")
    assert CacheReport.from_json(json.loads(json.dumps(report.to_json())), "a node") == report
    assert any(isinstance(one, StateClass) for one in classes)


def _tiled(rows: np.ndarray, axis: int = 0) -> np.ndarray:
    """Six heads of values in llama.cpp's order: those that keys 0 and 1 serve take turns."""
    apart = np.stack(np.split(rows, 6, axis=axis))
    return np.concatenate([*apart[[0, 3, 1, 4, 2, 5]]], axis=axis)


GGUF_NAMES = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight", "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight", "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight", "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight", "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight", "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight", "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight", "mlp.up_proj.weight": "ffn_up.weight", "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight", "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight", "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight", "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
ENDS = {
    "model.language_model.embed_tokens.weight": "token_embd.weight", "model.language_model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip


def _in_gguf(key: str, array: np.ndarray, is_fused: bool) -> dict[str, np.ndarray]:
    """A tensor of the published form as llama.cpp's converter writes it."""
    if key in ENDS:
        return {ENDS[key]: array + 1 if "norm" in key else array}
    match = re.fullmatch(r"model\.language_model\.layers\.(\d+)\.(.+)", key)
    if match is None:
        return {}
    block, name = f"blk.{match[1]}.", match[2]
    if name.endswith("norm.weight") and name != "linear_attn.norm.weight":
        array = array + 1
    if name == "linear_attn.A_log":
        array = -np.exp(array)
    if "conv1d" in name:
        array = array[:, 0]
    if "in_proj_qkv" in name or "conv1d" in name:
        array = np.concatenate([array[:64], _tiled(array[64:])])
    elif name.startswith("linear_attn.") and "norm" not in name:
        array = _tiled(array, int("out_proj" in name))
    if name.endswith("shared_expert_gate.weight"):
        array = array[0]
    if name.endswith("gate_up_proj") and not is_fused:
        gates, ups = np.split(array, 2, axis=1)
        return {f"{block}ffn_gate_exps.weight": gates, f"{block}ffn_up_exps.weight": ups}
    return {block + GGUF_NAMES[name]: array}


@pytest.mark.parametrize(("name", "is_fused"), [("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True)])
def test_gguf_files_give_the_same_logits(name: str, is_fused: bool, tmp_path: Path) -> None:
    import gguf

    folder, ids, expected = folder_of(name, tmp_path)
    writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", arch := "qwen35moe" if "moe" in name else "qwen35")
    numbers = {
        "block_count": 5, "embedding_length": 48, "attention.head_count": 6, "attention.head_count_kv": 2,
        "attention.key_length": 32, "attention.value_length": 32, "context_length": 200, "rope.dimension_count": 8,
        "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 192,
    }  # fmt: skip
    of_experts = {
        "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 64,
    }  # fmt: skip
    for key, value in (numbers | (of_experts if "moe" in name else {"feed_forward_length": 64})).items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.rope.freq_base", 5000.0)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    for key, tensor in load_file(folder / "model.safetensors").items():
        for theirs, array in _in_gguf(key, tensor.numpy(), is_fused).items():
            writer.add_tensor(theirs, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufSource(path)
    assert np.abs(logits_of(stages_of(source, [0, 5], len(ids)), ids) - expected).max() < TOLERANCE
    with pytest.raises(CheckpointError, match="^a Hugging Face "):
        export_hf(source, tmp_path, tmp_path / "out")


def test_exported_gguf_files_give_the_same_logits(tmp_path: Path) -> None:
    """Of Qwen3-Next; those of Qwen 3.5 have heads of values in another order where each key has several."""
    folder, ids, expected = folder_of("qwen3_next", tmp_path)
    export_gguf(PackedSource(open_source(folder), Packing("float32", "float32")), folder, out := tmp_path / "out.gguf")
    source = GgufSource(out)
    logits = logits_of(stages_of(source, [0, source.config.n_layer], len(ids)), ids)
    assert np.abs(logits - expected).max() < TOLERANCE
    fields, tensors = read_gguf(out).fields, read_gguf(out).tensors
    assert (
        fields["qwen3next.full_attention_interval"] == 4 and list(fields["qwen3next.rope.dimension_sections"])[3] == 0
    )
    assert len(tensors["blk.0.ssm_conv1d.weight"].shape) == 2
    folder, *_ = folder_of("qwen3_5", tmp_path)
    with pytest.raises(CheckpointError, match="qwen3_5$"):
        export_gguf(PackedSource(open_source(folder), Packing("float32", "float32")), folder, tmp_path / "other.gguf")


def test_a_plan_counts_what_states_take_and_what_each_token_reads_and_writes() -> None:
    """The blocks of Qwen3.5-35B-A3B: 30 states of 2 MiB."""
    hf = {
        "num_hidden_layers": 40, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 10_000_000,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
        "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    config = ModelConfig.of({**FAMILIES["qwen3_5_moe_text"].settings(hf), "name": "shape"})
    blocks = model_shape(config, "int8").blocks
    states, pages = ([blocks[i] for i in range(40) if (i % 4 == 3) == is_full] for is_full in (False, True))
    state, row = 32 * 128 * 128 * 4, (2 * 16 * 128 + 32 * 128 + 2 * 32) * 4
    assert sum(one.read_bytes(1000) for one in states) == sum(one.read_bytes(9) for one in states) == 30 * 2 * state
    assert sum(one.cache_bytes(100_000) for one in states) == 30 * (2 * state + (64 + 64 + 3) * row)
    assert pages[0].cache_bytes(100_000) > states[0].cache_bytes(100_000) > pages[0].cache_bytes(1000)
    assert 34.6e9 < sum(math.prod(shape) for shape in shapes_of(config).values()) < 34.7e9


def test_kept_states_go_on_as_if_nothing_had_ended(tmp_path: Path, computing: str) -> None:
    """From files of an ended text, at the end of its last whole page; without one of them nothing is filled."""
    source, rng = open_source(FOLDER / "qwen3_5"), random.Random(1)
    ids = [rng.randrange(1, 320) for _ in range(250)]
    stages, other = (stages_of(source, [0, 3, 5], 400, computing=computing) for _ in range(2))
    for at in range(0, 200, 50):
        rows_of(stages, ids[at : at + 50], at, 1)
    keys, owner = page_keys("", ids[:200]), f"{'0' * 16}-{'0' * 16}"
    keep = PrefixTask(KEEP, 1, 0, owner, b"".join(keys).hex(), 2, 128, 192, is_end=True)
    files = KeptFiles(tmp_path, 1 << 30, Secrets(tmp_path, None), lambda: 1 << 40, 1e12)
    for start in (0, 64):  # whose states have taken in rows behind them
        run = replace(keep, keys=b"".join(keys[: start // PAGE + 2]).hex(), start=start, stop=start + 64, is_end=False)
        assert all([files.answer(run, stage.caches).is_done for stage in stages])
    for stage in stages:
        assert files.answer(keep, stage.caches).is_done
    assert files.flush(60)
    find = replace(keep, kind=FIND, ends=f"{(1 << len(keys)) - 1:x}")
    for stage in other:
        find = files.answer(find, stage.caches)
    assert find.possible == 1 << 5, "a state has one end only"
    for stage in other:
        assert files.answer(replace(keep, kind=FILL, start=0), stage.caches).is_done
    found = rows_of(other, ids[192:], 192, 1)
    assert np.abs(found - Texts(source, computing).logits(ids)[192:]).max() <= CLOSE[computing]
    files.close()
    next(path for path, *_ in files.files()).unlink()
    assert not all([files.answer(find, stage.caches).possible for stage in other])
