"""Real nodes: texts with guesses equal those without, for all formats, caches, families and ways to share the work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from litgpt.model import GPT

from families import CONTEXT, FAMILIES, model_of, prompt
from guessing import Bold, guess_always, of_two_tokens
from mdi.engine.guesses import DraftModel
from mdi.engine.rows import ArrayRows
from mdi.engine.scheduler import Scheduler
from mdi.engine.sequence import SamplingParams
from mdi.engine.speculation import MOST_ROWS, WINDOW_ROWS
from mdi.engine.starter import StarterEngine
from mdi.errors import UsageError
from mdi.kernels import library
from mdi.kernels.blocks import why_not_in_kernels
from mdi.kernels.layout import Matrix, pack
from mdi.kernels.slices import Slice, SliceTable
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.tensors import EMBEDDING
from mdi.net.ring import LoopbackRing
from mdi.run.nodes import GivenNodes
from mdi.run.report import format_report
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import ParallelOptions, StarterOptions
from mdi.spec.window import WindowMemory, WindowOptions
from mdi.stages.kernel_stage import KernelStage, Resident
from secondaries import cluster_of, secondaries
from tiny_checkpoint import encode, write_checkpoint

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

PROMPTS = ("The ring", "Every node keeps a cache for each sequence. " * 3)
SAMPLED = SamplingParams(40, temperature=0.8, top_k=20, seed=5)
REPEATING = [of_two_tokens(SamplingParams(70, temperature=t, seed=7), 40, 41) for t in (0.0, 0.2)]
KNOWN = [f for f in FAMILIES if why_not_in_kernels(ModelConfig.from_litgpt(model_of(f).config)) is None]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain") / "tiny", with_end=False)


@pytest.fixture(autouse=True)
def nodes_with_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a text has several frames in flight, as over several machines."""
    monkeypatch.setattr("mdi.run.form.share_cores", lambda nodes: False)


def texts_of(
    n_nodes: int, checkpoint: Path, folder: Path, draft: str, **options: Any
) -> tuple[list[list[int]], tuple[int, int]]:
    """A greedy and a sampled text, one after the other, then both together; three that repeat themselves; and the guesses."""
    with secondaries(n_nodes - 1, folder) as nodes:
        cluster = cluster_of(nodes) if nodes else standalone()
        fields = {
            "placement": "even",
            "prompt_style": "none",
            "device": "cpu",
            "dtype": "float32",
            "wait_s": 5,
            **options,
        }
        made = StarterOptions(ckpt=checkpoint, cache_dir=folder, draft=draft, **fields)
        with Run(GivenNodes(cluster), made, 180, n_texts=3) as run:
            if draft != "none":
                guess_always(run.engine)
            for first, second in [(0, None), (None, 0), (1, 0)]:
                if first is not None:
                    run.submit(PROMPTS[first], encode(PROMPTS[first]), SamplingParams(40, temperature=0))
                if second is not None:
                    run.submit(PROMPTS[second], encode(PROMPTS[second]), SAMPLED)
                run.read()
            for i in range(3):  # at the same time
                run.submit("", encode(PROMPTS[i % 2])[: 20 + i], REPEATING[i % 2])
            run.read()
        return [list(sample.token_ids) for sample in run.samples], run.metrics().guesses


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "two": (2, {}),
    "four": (4, {}),
    "alone, int8": (1, {"quantize": "int8", "quantize_head": "int8"}),
    "three, int4, caches int8": (3, {"quantize": "int4", "quantize_head": "int4", "kv_dtype": "int8"}),
    "two, bf16, caches bf16": (2, {"quantize": "bf16", "quantize_head": "bf16", "kv_dtype": "bf16"}),
    "two, fp16, caches fp16, links int8": (
        2, {"quantize": "fp16", "quantize_head": "fp16", "kv_dtype": "fp16", "wire_dtype": "int8"}
    ),
    "a group": (2, {"parallel": ParallelOptions("tensor")}),
    "a window": (1, {"weight_memory": WindowMemory(window=WindowOptions(2))}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("has_draft", [False, True], ids=["lookup", "draft"])
def test_a_run_with_guesses_gives_the_same_texts(name: str, has_draft: bool, checkpoint: Path, tmp_path: Path) -> None:
    n_nodes, options = RUNS[name]
    plain, none = texts_of(n_nodes, checkpoint, tmp_path / "plain", "none", **options)
    found, (n_guessed, n_confirmed) = texts_of(
        n_nodes, checkpoint, tmp_path / "guessed", str(checkpoint) if has_draft else "auto", **options
    )
    assert found == plain and none == (0, 0)
    assert 40 < n_confirmed <= n_guessed


def test_a_small_model_with_other_tokens_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other")
    fields = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = fields["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(fields), encoding="utf-8")
    made = StarterOptions(ckpt=checkpoint, draft=str(other), prompt_style="none", device="cpu", cache_dir=tmp_path)
    with pytest.raises(UsageError) as refused, Run(GivenNodes(standalone()), made, 20):
        pass
    assert refused.value.code == "draft"


def options_of(checkpoint: Path, folder: Path, **fields: Any) -> StarterOptions:
    return StarterOptions(ckpt=checkpoint, prompt_style="none", device="cpu", cache_dir=folder, **fields)


def test_a_mixture_of_experts_guesses_one_row_a_frame(tmp_path: Path) -> None:
    """Each further row reads other experts."""
    mixture = write_checkpoint(
        tmp_path / "mixture", mlp_class_name="LLaMAMoE", n_expert=4, n_expert_per_token=2, moe_intermediate_size=24
    )
    with Run(GivenNodes(standalone()), options_of(mixture, tmp_path, draft="auto"), 20) as run:
        assert run.engine.speculation is not None and run.engine.speculation.most_rows == 1


@pytest.mark.parametrize(
    ("n_nodes", "has_window", "is_others", "is_shared"),
    [
        (1, False, False, False),
        (2, False, False, False),
        (1, True, False, False),
        (2, False, True, False),
        (2, False, False, True),
    ],
)
def test_a_text_has_one_frame_where_nodes_share_cores_or_read_weights_from_the_disk(
    n_nodes: int, has_window: bool, is_others: bool, is_shared: bool, checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The starter, or another node by flags of its own (`is_others`)."""
    monkeypatch.setattr("mdi.run.form.share_cores", lambda nodes: is_shared)
    window = WindowMemory(window=WindowOptions(2))
    memory = {"weight_memory": window} if has_window else {}
    with secondaries(n_nodes - 1, tmp_path, **({"weight_memory": window} if is_others else {})) as nodes:
        made = options_of(checkpoint, tmp_path, draft="auto", dtype="float32", placement="even", wait_s=5, **memory)
        with Run(GivenNodes(cluster_of(nodes) if nodes else standalone()), made, 20) as run:
            speculation = run.engine.speculation
            assert speculation is not None and speculation.most_rows == (WINDOW_ROWS if has_window else MOST_ROWS)
            assert run.engine.is_deep is not (has_window or is_others or is_shared)


def test_nothing_is_guessed_where_torch_computes_unless_it_is_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    params = SamplingParams(60, temperature=0)
    guesses = []
    for is_asked_for in (False, True):
        made = options_of(checkpoint, tmp_path, draft="auto", dtype="bfloat16", draft_inexact=is_asked_for)
        with Run(GivenNodes(standalone()), made, 200) as run:
            guess_always(run.engine)
            run.submit("", encode("One. " * 20), params)
            run.read()
            guesses.append(run.metrics().guesses[0])
            assert ("may have changed tokens" in format_report(run.metrics())) is is_asked_for
    assert guesses[0] == 0 < guesses[1]
    made = options_of(checkpoint, tmp_path, draft=str(checkpoint), dtype="bfloat16")
    with pytest.raises(UsageError, match="draft-inexact"), Run(GivenNodes(standalone()), made, 20):
        pass


def stage_of(gpt: GPT, form: str, cache_type: str) -> KernelStage:
    """A whole model in the kernels."""
    weights: dict[str, dict[str, Matrix | np.ndarray]] = {}
    for name, tensor in gpt.state_dict().items():
        parts = name.split(".")
        value = tensor.float().numpy()
        is_linear = name.endswith(".weight") and "norm" not in name and "ln_f" not in name and name != EMBEDDING
        packed = pack("float32" if "mlp.gate." in name else form, value) if is_linear and value.ndim == 2 else value
        part = f"block.{parts[2]}" if parts[1] == "h" else "embedding" if name == EMBEDDING else "head"
        weights.setdefault(part, {})[name] = packed
    config = ModelConfig.from_litgpt(gpt.config)
    names = ["embedding", *(f"block.{i}" for i in range(gpt.config.n_layer)), "head"]
    stage = KernelStage(
        spec_of(config), 0, gpt.config.n_layer, Resident(names, lambda part: weights[part]), 1, cache_type
    )
    stage.prepare(CONTEXT)
    return stage


@torch.no_grad()
@pytest.mark.parametrize("family", KNOWN)
def test_one_call_for_blocks_and_head_gives_the_same_bits(family: str) -> None:
    ids = np.array(prompt(9, 1))
    slices = SliceTable([Slice(1, 0, len(ids), 1)])
    for form in ("float32", "int8"):
        stage, other = (stage_of(model_of(family), form, "float32") for _ in range(2))
        x = stage(stage.embed(ids, slices), slices)
        assert (other.last_logits(ids, slices) == stage.head(x[-1:])).all()


@torch.no_grad()
@pytest.mark.parametrize("family", KNOWN)
def test_every_family_gives_the_same_texts_with_guesses_under_way(family: str) -> None:
    gpt = model_of(family)
    asked = [
        (prompt(70, 1), SamplingParams(40, temperature=0, n_logprobs=2)),
        (prompt(6, 2) * 3, SamplingParams(40, temperature=0.9, top_k=9, seed=3, presence_penalty=0.4)),
    ]
    results = []
    for form, cache_type in [("float32", "float32"), ("int8", "int8")]:
        stage = stage_of(gpt, form, cache_type)
        draft = DraftModel(stage_of(gpt, "float32", "float32"), ArrayRows(), CONTEXT)
        for speculation in (None, Bold(draft=draft)):
            engine = StarterEngine(stage, Scheduler(5), CONTEXT, ArrayRows())
            engine.speculation = speculation
            requests = [engine.submit(ids, params) for ids, params in asked]
            engine.run(LoopbackRing(5))
            results.append([[event for event in request] for request in requests])
            if speculation is not None:
                assert engine.scheduler.n_confirmed > 20
            assert not len(stage.caches) and not len(draft.stage.caches)
    assert results[0] == results[1] and results[2] == results[3]
