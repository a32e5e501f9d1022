"""Texts behind learned rows (prompts, deep prompts, prefixes): the tokens of the forward with which they were trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_models import tensors_of
from litgpt.model import GPT
from safetensors.torch import load_file, save_file

from families import config_of
from mdi.checkpoint.adapters import AdapterName, AdapterSource, check_stored
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.checkpoint.source import open_source
from mdi.checkpoint.virtual_adapters import open_adapter
from mdi.checkpoint.virtual_rows import stored_name
from mdi.engine.sequence import Request, SamplingParams
from mdi.errors import CheckpointError, KernelError, UsageError
from mdi.kernels import library
from mdi.kernels.slices import Slice, with_adapter
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.options import StarterOptions
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.plain_blocks import PlainBlocks
from mdi_training.tuned_tensors import TunedTensors, TuningKind, new_tensors
from secondaries import cluster_of, secondaries
from test_adapters import Made, run_of, texts
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

    def ids(self, adapter: str, prompt: str) -> list[int]:
        """By torch, as in training: all rows again for each token."""
        gpt, ids, prompt_ids = self.gpt, encode(prompt), encode(prompt)
        blocks = PlainBlocks(asdict(gpt.config), lambda i: named(gpt, i))
        tuned = self.tuned.get(adapter)
        before = None if tuned is None else tuned.before()
        own = {} if tuned is None else {name: one.detach().numpy() for name, one in tuned.of_blocks().items()}
        with torch.no_grad():
            for _ in range(N_TOKENS):
                x = gpt.transformer.wte(torch.tensor(ids))
                x = x if before is None else torch.cat([before, x])
                y = torch.from_numpy(blocks.forward(x[None].numpy(), 0, N_BLOCKS, own))[0, -1:]
                ids.append(int(gpt.lm_head(gpt.transformer.ln_f(y)).argmax()))
        return ids[len(prompt_ids) :]


def named(gpt: GPT, block: int) -> dict[str, Any]:
    return {f"transformer.h.{block}.{name}": w for name, w in tensors_of(gpt, block, "float32").items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    folder, gpt = tmp_path_factory.mktemp("virtual"), tiny_gpt()
    checkpoint = write_checkpoint(folder / "tiny", with_end=False)
    source, generator = open_source(checkpoint), torch.Generator().manual_seed(3)
    folders, tuned = {}, {}
    for name, kind in KINDS.items():
        tuned[name] = new_tensors(kind, source.config_dict, 1, lambda part: source)
        for parameter in tuned[name].named.values():
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)
        folders[name] = tuned[name].write(folder / name, "tiny", None).parent
    return Tuned(gpt, checkpoint, folders, {}, tuned)


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
    "guesses": {"draft": "auto"},
    "little memory": {"kv_memory": 400_000},
}


@pytest.mark.parametrize("way", WAYS)
def test_texts_do_not_depend_on_who_shares_their_frames(
    way: str, made: Tuned, expected: Expected, tmp_path: Path
) -> None:
    from mdi.stages.window_budget import WindowMemory, WindowOptions

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


@pytest.mark.parametrize("replay_memory", [0, 1 << 20], ids=["tokens", "replay"])
def test_texts_go_on_after_a_node_was_lost(replay_memory: int, made: Tuned, expected: Expected, tmp_path: Path) -> None:
    from mdi.net.hello import Fault

    fields = {"placement": "even", "prompt_style": "none", "device": "cpu", "dtype": "float32"}
    options = StarterOptions(
        ckpt=made.checkpoint, cache_dir=tmp_path, adapter=made.flags, replay_memory=replay_memory, **fields
    )
    with secondaries(2, tmp_path) as nodes, Run(GivenNodes(cluster_of(nodes)), options, 300, n_texts=6) as run:
        n = 0

        def show(text: str) -> None:
            nonlocal n
            n += 1
            if n == 12:
                job = nodes[0].runs.latest
                assert job is not None and job.ring is not None
                job.ring.fail(Fault("secondary0", "its connections are dropped", "secondary0", "failed"))

        wanted = [one for one in EACH if one[1] == PROMPTS[0]]
        samples = [run.submit(p, encode(p), GREEDY, on_text=show, adapter=name) for name, p in wanted]
        run.read()
        recoveries = run.metrics().recoveries
    assert [list(sample.token_ids) for sample in samples] == [expected[one] for one in wanted]
    assert [one["restored_by"] for one in recoveries] == ["replay" if replay_memory else "tokens"]


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
        open_adapter(AdapterName(name, made.folders[name]), numbers[name], source.config_dict, lambda: None)
        for name in names
    ]
    of = AdapterSource(adapters, lambda part: source)
    parts = [f"block.{i}" for i in range(start, stop)]
    weights = Resident(parts, lambda part: source.weights(part, Packing("float32", "float32")))
    own = {part: of.weights(part) for part in of.part_names() if start <= int(part.split(".")[1]) < stop}
    stage = KernelStage(source.config_dict, start, stop, weights, adapters=own)
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


# What is refused

SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no rows": ("prompt", {"num_virtual_tokens": 0}, "num_virtual_tokens 0 in"),
    "too many": ("prefix", {"num_virtual_tokens": 1 << 20}, "1 to 4096 are served"),
    "rows that the file does not have": ("prefix", {"num_virtual_tokens": 6}, "it is for another model"),
    "classes": ("prompt", {"task_type": "SEQ_CLS"}, "only CAUSAL_LM writes texts"),
    "an encoder": ("prompt", {"num_transformer_submodules": 2}, "an encoder and a decoder"),
    "whole layers": ("prompt", {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "another kind": ("prompt", {"peft_type": "P_TUNING"}, "peft_type 'P_TUNING'; only LORA, PROMPT_TUNING, "),
    "deep prompts that are not there": ("prompt", {"peft_type": "MDI_DEEP_PROMPT"}, "lacks transformer.h.1.prompt"),
    "a prefix of another width": ("prompt", {"peft_type": "PREFIX_TUNING"}, "it is for another model"),
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
    config = open_source(made.checkpoint).config_dict
    with pytest.raises(CheckpointError, match=words):
        open_adapter(AdapterName("x", changed(made, name, tmp_path, settings)), 1, config, lambda: None)


def test_a_file_or_a_model_that_does_not_fit_is_refused_by_name(made: Tuned, tmp_path: Path) -> None:
    source = open_source(made.checkpoint)
    folder = changed(made, "prompt", tmp_path, {}, **{"base_model.score.weight": torch.zeros(3, 48)})
    with pytest.raises(CheckpointError, match="base_model.score.weight', which is none of PROMPT_TUNING"):
        open_adapter(AdapterName("x", folder), 1, source.config_dict, lambda: None)
    changed(made, "prompt", tmp_path, {}, prompt_embeddings=torch.full((5, 48), float("nan")))
    adapter = open_adapter(AdapterName("x", folder), 1, source.config_dict, lambda: None)
    with pytest.raises(CheckpointError, match="not finite"):
        AdapterSource([adapter], lambda part: source).weights("adapter.0")
    for name, family, words in (
        ("prompt", "Gemma-2-9b", "multiplies its embeddings"), ("prefix", "Gemma-2-9b", "which see no prefix"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            open_adapter(AdapterName("x", made.folders[name]), 1, asdict(config_of(family)), lambda: None)


def test_the_hash_is_that_of_what_was_learned(made: Tuned, tmp_path: Path) -> None:
    config, tensor = open_source(made.checkpoint).config_dict, "prompt_embeddings"
    learned = load_file(made.folders["prompt"] / "adapter_model.safetensors")[tensor].clone()
    learned[4, 47] += 1
    folders = [*made.folders.values(), changed(made, "prompt", tmp_path, {}, **{tensor: learned})]
    assert (
        len({open_adapter(AdapterName("x", one), 1, config, lambda: None).sha256 for one in folders}) == len(KINDS) + 1
    )


def test_a_node_checks_the_rows_that_it_gets(made: Tuned) -> None:
    source = open_source(made.checkpoint)
    config = source.config_dict
    prompt, key, value = (stored_name(2, 1, what) for what in ("prompt", "prefix_key", "prefix_value"))
    right = {prompt: TensorSpec("F32", (5, 48)), key: TensorSpec("F32", (7, 16)), value: TensorSpec("F32", (7, 16))}
    check_stored(right, "adapter.2", config, "it")
    for change in (
        {prompt: TensorSpec("F32", (5, 47))}, {prompt: TensorSpec("F32", (0, 48))}, {prompt: TensorSpec("F32", (4097, 48))},
        {prompt: TensorSpec("F16", (5, 48))}, {prompt: TensorSpec("F32", (48,))}, {key: TensorSpec("F32", (8, 16))},
        {key: TensorSpec("F32", (7, 48))}, {stored_name(2, 2, "prefix_value"): TensorSpec("F32", (7, 16))},
        {stored_name(2, 65, "prompt"): TensorSpec("F32", (5, 48))}, {stored_name(3, 1, "prompt"): TensorSpec("F32", (5, 48))},
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="is no part of an adapter for this model"):
            check_stored({**right, **change}, "adapter.2", config, "it")

    weights = Resident(source.part_names(), lambda part: source.weights(part))
    rows = np.zeros((3, 16), dtype=np.float32)
    own = {f"adapter.{i}": {stored_name(i, 1, f"prefix_{what}"): rows for what in ("key", "value")} for i in range(5)}
    KernelStage(config, 0, 5, weights, adapters=own)
    with pytest.raises(KernelError, match="adapter 1 has no prefix for each of the blocks 0 to 4"):
        KernelStage(config, 0, 5, weights, adapters={part: one for part, one in own.items() if part != "adapter.3"})
    own["adapter.3"][stored_name(3, 1, "prefix_key")] = rows[:2]
    with pytest.raises(KernelError, match="2 rows, where others of its adapter have 3"):
        KernelStage(config, 0, 5, weights, adapters=own)
