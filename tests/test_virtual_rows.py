"""Texts behind learned rows (prompts, deep prompts, prefixes): the tokens of the forward with which they were trained."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_models import tensors_of
from litgpt.model import GPT
from safetensors.torch import load_file, save_file

from families import config_of, model_of
from lying_nodes import LIARS, make_lie
from mdi.checkpoint.adapters import AdapterName, AdapterSource, check_stored
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.checkpoint.source import open_source
from mdi.checkpoint.virtual_adapters import open_adapter
from mdi.checkpoint.virtual_rows import stored_name
from mdi.cli import launch
from mdi.engine.cohort import Beams
from mdi.engine.sampling import Row, log_probs, sample
from mdi.engine.sequence import Request, SamplingParams
from mdi.errors import CheckpointError, Code, KernelError, MdiError, UsageError
from mdi.kernels import library
from mdi.kernels.slices import Slice, with_adapter
from mdi.model.plain import ModelConfig, spec_of
from mdi.run.journal import Journal
from mdi.run.local import free_ports
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.spec.options import ParallelOptions, StarterOptions
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.plain_blocks import PlainBlocks
from mdi.text.texts import TextCodec
from mdi_training.tuned_tensors import TunedTensors, TuningKind, new_tensors
from secondaries import cluster_of, entry_of, secondaries
from test_adapters import Made, run_of, texts
from test_cohorts import naive
from tiny_checkpoint import encode, tiny_gpt, write_checkpoint

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

N_BLOCKS, N_TOKENS = 5, 16
GREEDY = SamplingParams(N_TOKENS, temperature=0)
PROMPTS = ("The ring", "Every node keeps a cache for each sequence. " * 3)
KINDS = {
    "prompt": TuningKind("prompt", length=5), "deep": TuningKind("deep-prompt", length=40),
    "prefix": TuningKind("prefix", length=5), "long": TuningKind("prefix", length=70), "lora": TuningKind("lora", rank=3),
}  # fmt: skip
EACH = [(name, prompt) for prompt in PROMPTS for name in ("", *KINDS)]


@dataclass(frozen=True)
class Tuned(Made):
    """Attributes: what was learned, by name."""

    tuned: dict[str, TunedTensors]

    def flag(self, name: str) -> str:
        return f"{name}={self.folders[name]}"

    def ids(self, adapter: str, prompt: str) -> list[int]:
        ids = encode(prompt)
        for _ in range(N_TOKENS):
            ids.append(int(self.logits(adapter, ids).argmax()))
        return ids[-N_TOKENS:]

    @torch.no_grad()
    def logits(self, adapter: str, ids: Sequence[int]) -> np.ndarray:
        """Of the next token, by torch, as in training: all rows again."""
        gpt, tuned = self.gpt, self.tuned.get(adapter)
        blocks = PlainBlocks(spec_of(ModelConfig.from_litgpt(gpt.config)), lambda i: named(gpt, i))
        before = None if tuned is None else tuned.before()
        own = {} if tuned is None else {name: one.detach().numpy() for name, one in tuned.of_blocks().items()}
        x = gpt.transformer.wte(torch.tensor(ids))
        x = x if before is None else torch.cat([before, x])
        y = torch.from_numpy(blocks.forward(x[None].numpy(), 0, N_BLOCKS, own))[0, -1:]
        found: np.ndarray = gpt.lm_head(gpt.transformer.ln_f(y))[0].numpy()
        return found


def named(gpt: GPT, block: int) -> dict[str, Any]:
    return {f"transformer.h.{block}.{name}": w for name, w in tensors_of(gpt, block, "float32").items()}


def tuned_in(folder: Path) -> Tuned:
    gpt = tiny_gpt()
    checkpoint = write_checkpoint(folder / "tiny", with_end=False)
    source, generator = open_source(checkpoint), torch.Generator().manual_seed(3)
    folders, tuned = {}, {}
    for name, kind in KINDS.items():
        tuned[name] = new_tensors(kind, source.config, 1, lambda part: source)
        # LoRA of 0.5 makes scores so large that float32 is wrong by 1e-4, by torch as by the kernels.
        size = 0.2 if kind.method == "lora" else 0.5
        for parameter in tuned[name].named.values():
            parameter.data = size * torch.randn(parameter.shape, generator=generator)
        folders[name] = tuned[name].write(folder / name, "tiny", None).parent
    return Tuned(gpt, checkpoint, folders, {}, tuned)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    return tuned_in(tmp_path_factory.mktemp("virtual"))


@pytest.fixture(scope="module")
def expected(made: Tuned) -> dict[tuple[str, str], list[int]]:
    return {one: made.ids(*one) for one in EACH}


Expected = dict[tuple[str, str], list[int]]


@pytest.mark.parametrize("n_nodes", [1, 3])
def test_each_text_has_the_tokens_of_the_forward_that_was_trained(
    n_nodes: int, made: Tuned, expected: Expected, tmp_path: Path
) -> None:
    assert len({tuple(ids) for ids in expected.values()}) == len(EACH), "an adapter changes nothing"
    with run_of(made, tmp_path, n_nodes) as run:
        assert texts(run, *EACH) == list(expected.values())
        assert [texts(run, one)[0] for one in EACH] == list(expected.values())
        for name, prompt in (("deep", PROMPTS[0]), ("prefix", PROMPTS[1])):  # as `--resume` does
            ids = expected[name, prompt]
            sample = run.submit(prompt, encode(prompt), GREEDY, before=ids[:6], adapter=name)
            run.read()
            assert list(sample.token_ids) == ids


WAYS: dict[str, dict[str, Any]] = {
    "int8, caches int8": {"quantize": "int8", "quantize_head": "int8", "kv_dtype": "int8"},
    "a window over the weights": {"weight_memory": None},
    "int4, caches fp16": {"quantize": "int4", "quantize_head": "int4", "kv_dtype": "fp16"},
    "mxfp4, caches bf16": {"quantize": "mxfp4", "quantize_head": "int8", "kv_dtype": "bf16"},
    "little memory": {"kv_memory": 400_000},
    "no guesses": {"draft": "none"},
}


@pytest.mark.parametrize("way", WAYS)
def test_texts_do_not_depend_on_who_shares_their_frames(
    way: str, made: Tuned, expected: Expected, tmp_path: Path
) -> None:
    from mdi.spec.window import WindowMemory, WindowOptions

    options = dict(WAYS[way])
    if "weight_memory" in options:
        options["weight_memory"] = WindowMemory(window=WindowOptions(2))
    with run_of(made, tmp_path / "plain", adapter=(), **options) as run:
        plain = [texts(run, one)[0] for one in EACH if not one[0]]
    with run_of(made, tmp_path / "all", 2, **options) as run:
        alone = [texts(run, one)[0] for one in EACH]
        assert texts(run, *EACH) == alone
    assert [ids for (name, _), ids in zip(EACH, alone, strict=True) if not name] == plain
    if "quantize" not in options:
        assert alone == list(expected.values())


@dataclass(frozen=True)
class Beside:
    """What a run has beside learned rows.

    Attributes:
        options: of the run.
        n_spares: the last of its three nodes.
        at: tokens after which secondary0 is lost.
        restored_by: of its report then.
        has_liar: whether secondary1 lies.
    """

    options: dict[str, Any]
    n_spares: int = 0
    at: int | None = None
    restored_by: str = ""
    has_liar: bool = False


BESIDE = {
    "lost, tokens": Beside({"replay_memory": 0}, at=12, restored_by="tokens"),
    "lost, replay": Beside({"replay_memory": 1 << 20}, at=12, restored_by="replay"),
    "lost, a spare": Beside({}, n_spares=1, at=3, restored_by="replay"),
    "lost, a hot spare": Beside({"hot_spare": ("secondary0",)}, n_spares=1, at=12, restored_by="hot spare"),
    "verified here": Beside({"verify": 1.0}),
    "verified by a spare": Beside({"verify": 1.0}, n_spares=1),
    "a liar": Beside({"verify": 1.0}, has_liar=True),
    "int8 on links": Beside({"wire_dtype": "int8"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BESIDE)
def test_texts_are_the_same_whatever_else_a_run_has(case: str, made: Tuned, expected: Expected, tmp_path: Path) -> None:
    from mdi.net.hello import Fault

    beside = BESIDE[case]
    fields = {"placement": "even", "prompt_style": "none", "device": "cpu", "dtype": "float32", "wait_s": 5}
    options = StarterOptions(
        ckpt=made.checkpoint, cache_dir=tmp_path, adapter=made.flags, **{**fields, **beside.options}
    )
    with secondaries(3, tmp_path) as nodes:
        if beside.has_liar:
            make_lie(nodes[1], LIARS["after many rows"])
        n = 3 - beside.n_spares
        spares = tuple(entry_of(node, is_spare=True) for node in nodes[n:])
        with Run(GivenNodes(replace(cluster_of(nodes[:n]), spares=spares)), options, 300, n_texts=12) as run:
            n_shown = 0

            def show(text: str) -> None:
                nonlocal n_shown
                n_shown += 1
                if n_shown == beside.at:
                    job = nodes[0].runs.latest
                    assert job is not None and job.ring is not None
                    job.ring.fail(Fault("secondary0", "its connections are dropped", "secondary0", Code.LOST))

            samples = [run.submit(p, encode(p), GREEDY, on_text=show, adapter=name) for name, p in EACH]
            run.read()
            found, told = [list(sample.token_ids) for sample in samples], run.metrics().recoveries
            if (verifier := run.verifier) is not None:
                assert [one.nodes for one, _ in verifier.found] == [("secondary1",)] * beside.has_liar
                # A ring that ends because of a liar leaves rows that were not compared: they do not count.
                assert verifier.n_checked > 500 and (beside.has_liar or not verifier.n_void)
                assert bool(verifier.n_by_others) is bool(beside.n_spares)
        if "wire_dtype" in beside.options:
            assert len({tuple(ids) for ids in found}) == len(EACH)
            with Run(GivenNodes(cluster_of(nodes)), options, 300, n_texts=12) as run:
                assert [texts(run, one)[0] for one in EACH] == found, "each alone, over another ring"
        else:
            assert found == list(expected.values())
            assert [one["restored_by"] for one in told if not beside.has_liar] == [beside.restored_by] * (
                beside.at is not None
            )


@pytest.fixture
def nodes_with_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a text has several frames in flight, as over several machines."""
    monkeypatch.setattr("mdi.run.form.share_cores", lambda nodes: False)


@pytest.mark.slow
@pytest.mark.usefixtures("nodes_with_cores_of_their_own")
@pytest.mark.parametrize("has_draft", [False, True], ids=["lookup", "draft"])
def test_guesses_change_no_text(has_draft: bool, made: Tuned, expected: Expected, tmp_path: Path) -> None:
    """Of repetitions, or of a small model, which knows no learned rows."""
    again = encode(PROMPTS[0] + "One. " * 12)
    with run_of(made, tmp_path, 3, draft=str(made.checkpoint) if has_draft else "auto") as run:
        assert run.engine.speculation is not None
        run.engine.speculation.limits = lambda sequence, n_places, *_: (n_places, 3)  # type: ignore[method-assign]
        assert [texts(run, one)[0] for one in EACH] == list(expected.values())
        assert texts(run, *EACH) == list(expected.values())
        for name in KINDS:
            request = run.engine.submit(again, GREEDY, adapter=name)
            ids = [*again]
            for token in written(request):
                assert token == int(made.logits(name, ids).argmax())
                ids.append(token)
        n_guessed, n_confirmed = run.engine.scheduler.n_guessed, run.engine.scheduler.n_confirmed
    assert 0 <= n_confirmed <= n_guessed and n_guessed > 10


PENALTIES = SamplingParams(
    N_TOKENS, 0.9, top_k=20, seed=5, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.5, n_logprobs=3
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [PENALTIES, replace(PENALTIES, temperature=0), SamplingParams(N_TOKENS, 0, repetition_penalty=0.3, n_logprobs=3)],
    ids=["drawn", "greedy", "the text's own tokens"],
)
def test_virtual_positions_are_no_tokens(params: SamplingParams, made: Tuned, tmp_path: Path) -> None:
    """Neither of a penalty nor of a seed; and log probabilities are those of the text alone."""
    prompt = encode(PROMPTS[1])
    with run_of(made, tmp_path, 2) as run:
        for name in KINDS:
            events = list(run.engine.submit(prompt, params, adapter=name))
            ids, told = [*prompt], [one for event in events for one in event.logprobs]
            for token, (logprob, best) in zip([t for event in events for t in event.tokens], told, strict=True):
                logits = made.logits(name, ids)[None]
                row = Row(params, len(ids) - len(prompt), ids, len(prompt))
                assert token == sample(logits, [row])[0]
                right, best_of = log_probs(logits[0], token, 3)
                assert logprob == pytest.approx(right, abs=1e-4) and [t for t, _ in best] == [t for t, _ in best_of]
                ids.append(token)
            assert len(ids) == len(prompt) + N_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("is_lost", [False, True], ids=["", "lost"])
def test_beams_are_those_of_the_forward_that_was_trained(is_lost: bool, made: Tuned, tmp_path: Path) -> None:
    from mdi.net.hello import Fault

    params, beams, ids = SamplingParams(6), Beams(3), encode(PROMPTS[0])
    with secondaries(2, tmp_path) as nodes:
        fields = {"placement": "even", "prompt_style": "none", "device": "cpu", "dtype": "float32", "wait_s": 5}
        options = StarterOptions(ckpt=made.checkpoint, cache_dir=tmp_path, adapter=made.flags, **fields)
        with Run(GivenNodes(cluster_of(nodes)), options, 300, n_texts=3 * len(KINDS)) as run:
            if is_lost:
                job = nodes[0].runs.latest
                assert job is not None

                def fail(text: str) -> None:
                    if job.ring is not None:
                        job.ring.fail(Fault("secondary0", "its connections are dropped", "secondary0", Code.LOST))

                run.submit("", ids, SamplingParams(4, temperature=0), on_text=fail)
            found = {
                name: run.submit_beams("", ids, params, beams, on_texts=[None] * 3, adapter=name) for name in KINDS
            }
            run.read()
            assert bool(run.metrics().recoveries) is is_lost
    for name, samples in found.items():

        def after(known: tuple[int, ...], name: str = name) -> np.ndarray:
            return torch.log_softmax(torch.from_numpy(made.logits(name, known)), -1).numpy()

        assert [tuple(one.token_ids) for one in samples] == naive(after, tuple(ids), params, beams)


def test_a_chat_goes_on_behind_learned_rows(
    made: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was said first is forgotten where the learned rows leave no place for it."""
    lines = ["The ring", "Every node", "A frame"]

    def replies(name: str, n_positions: int) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
        own = ["--sequence-length", str(n_positions), "--adapter", made.flag(name)]
        fixed = ["--ckpt", str(made.checkpoint), "--device", "cpu", "--prompt-style", "none", "--dtype", "float32"]
        assert launch("chat", [*fixed, *own, "--n-tokens", "8", "--temperature", "0"]) == 0
        said = capsys.readouterr().out.split("Model: ")[1:]
        return [part.removeprefix(line).strip() for line, part in zip(lines, said, strict=True)]

    codec = TextCodec.from_checkpoint(made.checkpoint, "none")
    for name in ("prompt", "deep", "long"):
        history: list[tuple[str, str]] = []
        for line, reply in zip(lines, replies(name, 500), strict=True):
            ids = codec.encode_chat(history, line)
            n = len(ids)
            for _ in range(8):
                ids.append(int(made.logits(name, ids).argmax()))
            told = codec.decode(ids[n:])
            assert reply == told.strip()
            history.append((line, told))
    short = len(codec.encode_chat([], lines[-1])) + 8
    said = replies("long", 70 + short)
    ids = codec.encode_chat([], lines[-1])
    for _ in range(8):
        ids.append(int(made.logits("long", ids).argmax()))
    assert said[-1] == codec.decode(ids[-8:]).strip()


def test_a_run_that_was_interrupted_goes_on_with_its_adapter(
    made: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the folder in which it was begun; and with no other one in its place."""
    begun, runs = tmp_path / "begun", tmp_path / "runs"
    shutil.copytree(made.folders["deep"], begun / "mine")
    monkeypatch.chdir(begun)
    port, port_in = free_ports(2)
    entry = {"addr": "127.0.0.1", "communication": {"port": port}, "inference": {"port_in": port_in}}
    (tmp_path / "nodes.json").write_text(json.dumps({"nodes": {"starter": entry, "secondary": []}}))
    fixed = (
        "--n-samples 2 --n-tokens 16 --temperature 0 --prompt-style none --device cpu --dtype float32 --adapter mine"
    )
    flags = ["--ckpt", str(made.checkpoint), "--nodes-config", "../nodes.json", "--prompt", PROMPTS[0], *fixed.split()]
    add, n_added = Journal.add, 0

    def add_and_break(self: Journal, *args: Any) -> None:
        nonlocal n_added
        add(self, *args)
        n_added += 1
        if n_added == 9:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", add_and_break)
        assert launch("starter", [*flags, "--run-dir", str(runs)]) == 130
    monkeypatch.chdir(tmp_path)
    resumed = ["--resume", "last", "--run-dir", str(runs), "--json"]
    capsys.readouterr()
    weights = begun / "mine" / "adapter_model.safetensors"
    right = weights.read_bytes()
    save_file({name: 1 + tensor for name, tensor in load_file(weights).items()}, weights)
    assert launch("starter", resumed) == 2
    assert "begun with another model or other options" in capsys.readouterr().err
    weights.write_bytes(right)
    capsys.readouterr()
    assert launch("starter", resumed) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    assert [one["token_ids"] for one in samples] == [made.ids("deep", PROMPTS[0])] * 2


def written(request: Request) -> list[int]:
    return [token for event in request for token in event.tokens]


def test_no_text_continues_from_rows_of_another_adapter(made: Tuned, expected: Expected, tmp_path: Path) -> None:
    """One owner, one prompt, and two adapters of as many rows: the tokens that stand for these are the same."""
    ids, names = encode(PROMPTS[1]), ["", *KINDS]
    with run_of(made, tmp_path, 2) as run:
        engine = run.engine
        together = [engine.submit(ids, GREEDY, owner="me", adapter=name) for name in (*names, *names)]
        assert [written(one) for one in together] == [expected[name, PROMPTS[1]] for name in (*names, *names)]
        for name in reversed(names):
            again = engine.submit(ids, GREEDY, owner="me", adapter=name)
            assert written(again) == expected[name, PROMPTS[1]]
            assert 0 < again.n_reused < len(ids), "an adapter's own rows are kept, and only the text's are counted"
        for name in ("prompt", "prefix"):  # one behind the other
            text = engine.submit(ids, GREEDY, owner="you", adapter=name)
            assert written(text) == expected[name, PROMPTS[1]] and not text.n_reused


def test_learned_rows_take_positions_of_the_context(made: Tuned, tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="--adapter long: its 70 rows leave no place"),
        run_of(made, tmp_path, sequence_length=70),
    ):
        pass
    ids = encode("The ring is closed link by link. " * 20)[:100]
    with run_of(made, tmp_path, sequence_length=120) as run:
        engine = run.engine
        with pytest.raises(UsageError, match="100 tokens behind 70 rows of long, but a sequence can have 120"):
            engine.submit(ids, GREEDY, adapter="long")
        request = engine.submit(ids[:45], GREEDY, adapter="long")
        assert len(written(request)) == 120 - 70 - 45
        assert request.n_prompt == 115
        assert {*request.sequence.prompt_ids} == {*ids[:45]}, "a penalty on repeated tokens sees no other one"


# Stages


def stage_of(made: Tuned, start: int, stop: int, *names: str) -> KernelStage:
    source = open_source(made.checkpoint)
    numbers = {name: number for number, name in enumerate(KINDS, 1)}
    adapters = [
        open_adapter(AdapterName(name, made.folders[name]), numbers[name], source.config, lambda: None)
        for name in names
    ]
    of = AdapterSource(adapters, lambda part: source)
    parts = [f"block.{i}" for i in range(start, stop)]
    weights = Resident(parts, lambda part: source.weights(part, Packing("float32", "float32")))
    own = {part: of.weights(part) for part in of.part_names() if start <= int(part.split(".")[1]) < stop}
    stage = KernelStage(spec_of(source.config), start, stop, weights, adapters=own)
    stage.prepare(200)
    return stage


@pytest.mark.parametrize("blocks", [(0, 5), (2, 5)])
def test_rows_have_the_same_bits_however_they_are_cut_and_in_any_company(blocks: tuple[int, int], made: Tuned) -> None:
    """Slices that begin or end among the learned rows or behind them, as copies, replays and small frames do."""
    rows = np.random.default_rng(5).standard_normal((6, 90, 48)).astype(np.float32)
    seq_ids = [with_adapter(number, 7 + number) for number in range(6)]
    stage = stage_of(made, *blocks, *KINDS)

    def computed(which: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        found: list[list[np.ndarray]] = [[] for _ in which]
        for first, end in zip((0, *ends), (*ends, 90), strict=True):
            x = np.concatenate([rows[i, first:end] for i in which])
            y = stage(x, [Slice(seq_ids[i], first, end - first) for i in which])
            for k, part in enumerate(np.split(y, len(which))):
                found[k].append(part)
        for i in which:
            stage.caches.free(seq_ids[i])
        return [np.concatenate(one).tobytes() for one in found]

    together = computed(range(6), ())
    assert len({*together}) == 6
    for ends in ((5,), (3, 4, 41, 69), (70, 71)):
        assert computed((5, 3, 1, 0, 2, 4), ends) == [together[i] for i in (5, 3, 1, 0, 2, 4)]
    for i in range(6):
        assert computed([i], (64,)) == [together[i]]
    plain = stage_of(made, *blocks, "lora")  # and a text without learned rows has those of a stage without any
    for i in (0, 5):
        assert plain(rows[i], [Slice(seq_ids[i], 0, 90)]).tobytes() == together[i]


def test_a_block_s_outputs_for_a_side_network_are_those_behind_it(made: Tuned) -> None:
    """Rows that want logits, behind blocks 1 and 3, beside deep prompts that are added before blocks 2 and 4."""
    rows = np.random.default_rng(6).standard_normal((90, 48)).astype(np.float32)
    whole = stage_of(made, 0, 5, *KINDS)
    for number in range(6):
        part = Slice(with_adapter(number, number), 0, 90, 6)
        y = whole(rows, [part], (1, 3))
        x = rows
        for begin, end in ((0, 2), (2, 4), (4, 5)):
            x = stage_of(made, begin, end, *KINDS)(x, [part])
            if end < 5:
                assert y[90 + 6 * (end // 2 - 1) :][:6].tobytes() == x[-6:].tobytes()
        assert y[:90].tobytes() == x.tobytes()


FAMILY: dict[tuple[str, str], str] = {
    ("Mixtral-8x7B-v0.1", "lora"): "", ("Mixtral-8x7B-v0.1", "experts"): "experts, their router",
    ("Mixtral-8x7B-v0.1", "prompt"): "", ("Mixtral-8x7B-v0.1", "deep"): "", ("Mixtral-8x7B-v0.1", "prefix"): "",
    ("Mistral-7B-v0.1", "lora"): "", ("Mistral-7B-v0.1", "prompt"): "", ("Mistral-7B-v0.1", "deep"): "",
    ("Mistral-7B-v0.1", "prefix"): "attention in windows", ("Gemma-3-1b-it", "lora"): "",
    ("Gemma-3-1b-it", "prompt"): "multiplies its embeddings", ("Gemma-3-1b-it", "prefix"): "attention in windows",
    ("deepseek-v3-shape", "lora"): "latent attention cannot", ("deepseek-v3-shape", "prompt"): "latent attention",
    ("deepseek-v3-shape", "deep"): "latent attention", ("deepseek-v3-shape", "prefix"): "latent attention",
    ("pythia-14m", "lora"): "", ("pythia-14m", "prefix"): "", ("falcon-7b", "deep"): "", ("Qwen3-0.6B", "prefix"): "",
}  # fmt: skip
OF_FAMILIES = {**KINDS, "experts": TuningKind("lora", targets=("mlp",))}


@pytest.mark.parametrize("family, name", FAMILY)
def test_what_a_family_can_have_is_computed_as_it_is_trained_else_refused(
    family: str, name: str, tmp_path: Path
) -> None:
    """As the table of docs/training.md says: trained, and served from its folder in the kernels."""
    gpt, why_not = model_of(family), FAMILY[family, name]
    source = open_source(write_checkpoint(tmp_path / "ckpt", gpt=gpt))
    config = source.config
    if why_not:
        with pytest.raises(UsageError, match=why_not):
            new_tensors(OF_FAMILIES[name], config, 1, lambda part: source)
        return
    tuned = new_tensors(OF_FAMILIES[name], config, 1, lambda part: source)
    for parameter in tuned.named.values():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    folder = tuned.write(tmp_path / "own", family, None).parent
    adapter = open_adapter(AdapterName("x", folder), 1, config, lambda: None)
    of, n, n_layer = AdapterSource([adapter], lambda part: source), adapter.n_virtual, config.n_layer
    weights = Resident(source.part_names(), lambda part: source.weights(part, Packing("float32", "float32")))
    stage = KernelStage(spec_of(config), 0, n_layer, weights, adapters={p: of.weights(p) for p in of.part_names()})
    stage.prepare(120)
    rows = np.random.default_rng(4).standard_normal((n + 30, gpt.config.n_embd)).astype(np.float32)
    found = stage(rows, [Slice(with_adapter(1, 0), 0, n + 30)])[n:]
    plain = stage(rows, [Slice(1, 0, n + 30)])[n:]
    before = tuned.before()
    x = rows[n:] if before is None else np.concatenate([before.detach().numpy(), rows[n:]])
    own = {name: one.detach().numpy() for name, one in tuned.of_blocks().items()}
    expected = PlainBlocks(spec_of(config), lambda i: named(gpt, i)).forward(x[None], 0, n_layer, own)[0, -30:]
    size = np.linalg.norm(expected)
    assert np.linalg.norm(found - expected) / size < 1e-4 and np.linalg.norm(found - plain) / size > 0.01


REFUSED: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "all in a group": (1, {}, {"parallel": ParallelOptions(mode="tensor")}, "--adapter: .*--parallel tensor"),
    "a starter in torch": (1, {}, {"dtype": "bfloat16"}, "--adapter: this node computes --dtype bfloat16"),
    "a node in torch": (
        1,
        {"dtype": "bfloat16"},
        {},
        "--adapter: secondary0 computes --dtype bfloat16",
    ),
}


@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case in REFUSED for name in ("prompt", "deep", "prefix")][:-3]
    + [("a node in torch", "deep"), ("a node in torch", "prefix")]
)  # fmt: skip
def test_nodes_that_cannot_have_learned_rows_are_named_before_weights_are_sent(
    case: str, name: str, made: Tuned, tmp_path: Path
) -> None:
    n, of_node, changes, words = REFUSED[case]
    fields = {"placement": "even", "prompt_style": "none", "device": "cpu", **changes}
    options = StarterOptions(ckpt=made.checkpoint, cache_dir=tmp_path, adapter=(made.flag(name),), **fields)
    with (
        secondaries(n, tmp_path, **of_node) as nodes,
        pytest.raises(MdiError, match=words),
        Run(GivenNodes(cluster_of(nodes)), options, 60, n_texts=1),
    ):
        pass
    assert not [*tmp_path.glob("cache*/*.safetensors")]


def test_a_prompt_needs_the_kernels_for_block_0_only(made: Tuned, tmp_path: Path) -> None:
    fields = {"placement": "even", "prompt_style": "none", "device": "cpu", "dtype": "float32", "cache_dir": tmp_path}
    options = StarterOptions(ckpt=made.checkpoint, adapter=(made.flag("prompt"),), **fields)
    with (
        secondaries(1, tmp_path, dtype="bfloat16") as nodes,
        Run(GivenNodes(cluster_of(nodes)), options, 120, n_texts=1) as run,
    ):
        found = texts(run, ("prompt", PROMPTS[0]), ("", PROMPTS[0]))
    assert found[0][:2] == made.ids("prompt", PROMPTS[0])[:2] and found[0] != found[1], "rounded, so texts part"


@pytest.mark.slow
def test_a_group_in_the_nodes_file_is_refused_by_name(made: Tuned, tmp_path: Path) -> None:
    """And where nodes may share blocks or not, they do not."""
    fields = {"prompt_style": "none", "device": "cpu", "dtype": "float32", "placement": "even", "cache_dir": tmp_path}
    for name in ("prefix", "lora"):
        with secondaries(2, tmp_path) as nodes:
            cluster = cluster_of(nodes, group="g")
            options = StarterOptions(ckpt=made.checkpoint, adapter=(made.flag(name),), **fields)
            with (
                pytest.raises(MdiError, match="a model with adapters"),
                Run(GivenNodes(cluster), options, 60, n_texts=1),
            ):
                pass
            options = replace(options, parallel=ParallelOptions(mode="auto"))
            with Run(GivenNodes(cluster_of(nodes)), options, 120, n_texts=1) as run:
                assert texts(run, (name, PROMPTS[0])) == [made.ids(name, PROMPTS[0])]


# What is refused

SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no rows": ("prompt", {"num_virtual_tokens": 0}, "num_virtual_tokens 0 in"),
    "too many": ("prefix", {"num_virtual_tokens": 1 << 20}, "1 to 4096 are served"),
    "rows that the file does not have": ("prefix", {"num_virtual_tokens": 6}, r"\[6, 160\]"),
    "classes": ("prompt", {"task_type": "SEQ_CLS"}, "only CAUSAL_LM writes texts"),
    "an encoder": ("prompt", {"num_transformer_submodules": 2}, "an encoder and a decoder"),
    "whole layers": ("prompt", {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "another kind": ("prompt", {"peft_type": "P_TUNING"}, "peft_type 'P_TUNING'"),
    "deep prompts that are not there": ("prompt", {"peft_type": "MDI_DEEP_PROMPT"}, "lacks transformer.h.1.prompt"),
    "a prefix of another width": ("prompt", {"peft_type": "PREFIX_TUNING"}, r"\[5, 160\]"),
}


def changed(made: Tuned, name: str, folder: Path, settings: dict[str, Any], **tensors: torch.Tensor) -> Path:
    told = json.loads((made.folders[name] / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**told, **settings}))
    found = load_file(made.folders[name] / "adapter_model.safetensors")
    save_file({**found, **tensors}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting_that_is_not_served_is_refused_by_name(case: str, made: Tuned, tmp_path: Path) -> None:
    name, settings, words = SETTINGS[case]
    config = open_source(made.checkpoint).config
    with pytest.raises(CheckpointError, match=words):
        open_adapter(AdapterName("x", changed(made, name, tmp_path, settings)), 1, config, lambda: None)


def test_a_file_or_a_model_that_does_not_fit_is_refused_by_name(made: Tuned, tmp_path: Path) -> None:
    source = open_source(made.checkpoint)
    folder = changed(made, "prompt", tmp_path, {}, **{"base_model.score.weight": torch.zeros(3, 48)})
    with pytest.raises(CheckpointError, match="base_model.score.weight', which is none of PROMPT_TUNING"):
        open_adapter(AdapterName("x", folder), 1, source.config, lambda: None)
    changed(made, "prompt", tmp_path, {}, prompt_embeddings=torch.full((5, 48), float("nan")))
    with pytest.raises(CheckpointError, match="prompt_embeddings", check=lambda e: e.code == "adapter"):
        open_adapter(AdapterName("x", folder), 1, source.config, lambda: None)
    gemma = ModelConfig.from_litgpt(config_of("Gemma-2-9b"))
    for name in ("prompt", "prefix"):
        words = f"{name.upper()}_TUNING, and Gemma-2-9b "
        with pytest.raises(CheckpointError, match=words, check=lambda e: e.code == "adapter"):
            open_adapter(AdapterName("x", made.folders[name]), 1, gemma, lambda: None)


Change = Callable[[Path], object]  # of a folder in its place


def edited(**settings: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], **metadata: str) -> Change:
    def write(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        save_file(change(load_file(path)), path, metadata or None)

    return write


def weights_file(data: bytes) -> Change:
    return lambda folder: (folder / "adapter_model.safetensors").write_bytes(data)


def is_pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def head(fields: Any) -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text


HUGE = {"prompt_embeddings": {"dtype": "F32", "shape": [1 << 40, 48], "data_offsets": [0, 4 * 48 << 40]}}
STRANGE: dict[str, tuple[Change, str]] = {
    "a row too few": (
        tensors(lambda t: {**t, "prompt_embeddings": t["prompt_embeddings"][1:].clone()}),
        r"\[4, 48\]",
    ),
    "a column too many": (tensors(lambda t: {**t, "prompt_embeddings": torch.zeros(5, 49)}), r"\[5, 49\]"),
    "one dimension": (tensors(lambda t: {**t, "prompt_embeddings": torch.zeros(5 * 48)}), r"\[240\]"),
    "three dimensions": (tensors(lambda t: {**t, "prompt_embeddings": torch.zeros(5, 48, 1)}), r"\[5, 48, 1\]"),
    "doubles": (tensors(lambda t: {k: v.double() for k, v in t.items()}), "float64"),
    "whole numbers": (tensors(lambda t: {k: v.int() for k, v in t.items()}), "int32"),
    "another block's": (
        tensors(lambda t: {**t, "transformer.h.5.prompt": torch.zeros(5, 48)}),
        "'transformer.h.5.prompt'",
    ),
    "a path as a name": (tensors(lambda t: {**t, "../../up": torch.zeros(5, 48)}), "'../../up'"),
    "nothing": (tensors(lambda t: {}), "lacks prompt_embeddings"),
    "no number": (tensors(lambda t: {k: v * float("nan") for k, v in t.items()}), "numbers in prompt_embeddings"),
    "infinite": (
        tensors(lambda t: {k: (v.sign() * 1e38).half() for k, v in t.items()}),
        "numbers in prompt_embeddings",
    ),
    "other weights": (tensors(lambda t: t, mdi_base="0" * 64), "trained on other weights"),
    "a shape that is not there": (weights_file(head(HUGE)), f"{(4 * 48 << 40) + len(head(HUGE))} expected"),
    "a head that is not there": (weights_file((1 << 60).to_bytes(8, "little") + b"{}"), f"a head of {1 << 60}"),
    "a head of lists": (weights_file(head({"prompt_embeddings": [[]]})), "its head is damaged"),
    "a head too large": (weights_file(head({"a" * (1 << 24): {}})), f"a head of {(1 << 24) + 8}"),
    "pickled": (weights_file(b"PK\x03\x04" * 100), ": 400 bytes"),
    "empty": (weights_file(b""), ": 0 bytes"),
    "a pipe of tensors": (is_pipe("adapter_model.safetensors"), "has no adapter_model.safetensors"),
    "a pipe of settings": (is_pipe("adapter_config.json"), "is no file"),
    "more rows than memory": (edited(num_virtual_tokens=1 << 62), f"num_virtual_tokens {1 << 62}"),
    "rows below none": (edited(num_virtual_tokens=-1), "num_virtual_tokens -1"),
    "rows as a text": (edited(num_virtual_tokens="5"), "num_virtual_tokens 5"),
    "true rows": (edited(num_virtual_tokens=True), "num_virtual_tokens True"),
    "rows and a half": (edited(num_virtual_tokens=5.0), "num_virtual_tokens 5.0"),
    "a kind that is a list": (edited(peft_type=["LORA"]), r"peft_type \"\['LORA'\]"),
    "no kind": (edited(peft_type=None), "peft_type 'None'"),
    "lists in lists": (lambda folder: (folder / "adapter_config.json").write_text("[" * 100_000), "cannot be read"),
    "no text": (lambda folder: (folder / "adapter_config.json").write_bytes(b"\xff\xfe{}"), "cannot be read"),
    "a list": (lambda folder: (folder / "adapter_config.json").write_text("[]"), "has no settings"),
    "too many settings": (edited(more="x" * (1 << 20)), "cannot be read"),
    "a scale beyond numbers": (edited(peft_type="LORA", r=3, lora_alpha=10**400), "lora_alpha 1000"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_strangers_folder_is_refused_in_one_line_before_a_node_is_asked(
    case: str, made: Tuned, tmp_path: Path
) -> None:
    change, words = STRANGE[case]
    folder = shutil.copytree(made.folders["prompt"], tmp_path / "strange")
    change(folder)
    nowhere = NodeConfig("secondary0", "127.0.0.1", 1, 1)
    cluster = ClusterConfig(NodeConfig("starter", "127.0.0.1", 0, 0), (nowhere,))
    options = StarterOptions(
        ckpt=made.checkpoint, prompt_style="none", device="cpu", dtype="float32", adapter=(f"x={folder}",)
    )
    source = open_source(made.checkpoint)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=words):
            open_adapter(AdapterName("x", folder), 1, source.config, lambda: "1" * 64)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(CheckpointError, match=words) as refused, Run(GivenNodes(cluster), options, 60, n_texts=1):
        pass
    told = str(refused.value)
    assert "\n" not in told and len(told) < 600 and str(folder) in told


@pytest.mark.parametrize("name", KINDS)
def test_damaged_bytes_are_refused_or_change_numbers_only(name: str, made: Tuned, tmp_path: Path) -> None:
    """Some bytes of a file are others, there are more, or fewer."""
    chance, config = random.Random(name), open_source(made.checkpoint).config
    folder = shutil.copytree(made.folders[name], tmp_path / "strange")
    n_refused = 0
    for _ in range(150):
        path = folder / chance.choice(["adapter_config.json", "adapter_model.safetensors"])
        whole = path.read_bytes()
        data, n_head = bytearray(whole), min(len(whole), 1200)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(n_head)
            how = chance.randrange(3)
            if how == 0:
                data[at] = chance.randrange(256)
            else:
                data[at : at + chance.randrange(9)] = chance.randbytes(chance.randrange(9)) if how == 1 else b"9" * 12
        path.write_bytes(data)
        try:
            adapter = open_adapter(AdapterName("x", folder), 1, config, lambda: None)
        except CheckpointError as e:
            n_refused += 1
            assert len(str(e)) < 1000
        else:
            for block in adapter.blocks:
                found = adapter.arrays(block)
                assert {name: one.shape for name, one in found.items()} == {
                    k: v.shape for k, v in adapter.specs(block).items()
                }
        path.write_bytes(whole)
    assert n_refused > 75


def test_the_hash_is_that_of_what_was_learned(made: Tuned, tmp_path: Path) -> None:
    config, tensor = open_source(made.checkpoint).config, "prompt_embeddings"
    learned = load_file(made.folders["prompt"] / "adapter_model.safetensors")[tensor].clone()
    learned[4, 47] += 1
    folders = [*made.folders.values(), changed(made, "prompt", tmp_path, {}, **{tensor: learned})]
    assert (
        len({open_adapter(AdapterName("x", one), 1, config, lambda: None).sha256 for one in folders}) == len(KINDS) + 1
    )


def test_a_node_checks_the_rows_that_it_gets(made: Tuned) -> None:
    source = open_source(made.checkpoint)
    config = source.config
    prompt, key, value = (stored_name(2, 1, what) for what in ("prompt", "prefix_key", "prefix_value"))
    right = {prompt: TensorSpec("F32", (5, 48)), key: TensorSpec("F32", (7, 16)), value: TensorSpec("F32", (7, 16))}
    check_stored(right, "adapter.2", config, "it")
    for change in (
        {prompt: TensorSpec("F32", (5, 47))}, {prompt: TensorSpec("F32", (0, 48))}, {prompt: TensorSpec("F32", (4097, 48))},
        {prompt: TensorSpec("F16", (5, 48))}, {prompt: TensorSpec("F32", (48,))}, {key: TensorSpec("F32", (8, 16))},
        {key: TensorSpec("F32", (7, 48))}, {stored_name(2, 2, "prefix_value"): TensorSpec("F32", (7, 16))},
        {stored_name(2, 65, "prompt"): TensorSpec("F32", (5, 48))}, {stored_name(3, 1, "prompt"): TensorSpec("F32", (5, 48))},
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="^it: "):
            check_stored({**right, **change}, "adapter.2", config, "it")

    weights = Resident(source.part_names(), lambda part: source.weights(part))
    rows = np.zeros((3, 16), dtype=np.float32)
    own = {f"adapter.{i}": {stored_name(i, 1, f"prefix_{what}"): rows for what in ("key", "value")} for i in range(5)}
    KernelStage(spec_of(config), 0, 5, weights, adapters=own)
    with pytest.raises(KernelError, match="adapter 1 has no prefix for each of the blocks 0 to 4"):
        KernelStage(
            spec_of(config), 0, 5, weights, adapters={part: one for part, one in own.items() if part != "adapter.3"}
        )
    own["adapter.3"][stored_name(3, 1, "prefix_key")] = rows[:2]
    with pytest.raises(KernelError, match="2 rows, where others of its adapter have 3"):
        KernelStage(spec_of(config), 0, 5, weights, adapters=own)
