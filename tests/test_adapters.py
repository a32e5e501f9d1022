"""Texts with adapters: the tokens are those of the merged weights, and nobody's company changes a bit."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from litgpt.model import GPT
from safetensors.torch import load_file, save_file

from adapter_files import LLAMA, write_adapter
from families import greedy
from mdi.checkpoint.adapters import BASE_KEY, Adapter, AdapterName, AdapterSource, adapter_names, low_rank, weights_hash
from mdi.checkpoint.safetensors_layout import STRANGERS_LIMIT_BYTES
from mdi.checkpoint.source import open_source
from mdi.checkpoint.virtual_adapters import open_adapter
from mdi.engine.sequence import SamplingParams
from mdi.errors import CheckpointError, Code, ControlError, KernelError, MdiError, UsageError
from mdi.kernels import library
from mdi.kernels.slices import Slice, with_adapter
from mdi.kernels.weight_formats import LAYOUTS
from mdi.model.plain import spec_of
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.extent import Extent
from mdi.spec.options import SIDE_FILE, ParallelOptions, StarterOptions
from mdi.spec.window import WindowMemory, WindowOptions
from mdi.stages.kernel_stage import KernelStage, Resident
from secondaries import cluster_of, secondaries
from tiny_checkpoint import encode, tiny_gpt, write_checkpoint

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

N_TOKENS = 16
PROMPTS = ("The ring", "Every node keeps a cache for each sequence. " * 3)
GREEDY = SamplingParams(N_TOKENS, temperature=0)
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"seed": 1},
    "values": {
        "seed": 2,
        "rank": 9,
        "modules": ["self_attn.q_proj", "self_attn.v_proj"],
        "settings": {"use_rslora": True},
    },
    "later": {"seed": 3, "rank": 1, "modules": ["mlp.down_proj", "mlp.up_proj"], "blocks": [1, 4]},
}


@dataclass(frozen=True)
class Made:
    """Attributes: the model, its folder, those of the adapters, and the models that each makes of it."""

    gpt: GPT
    checkpoint: Path
    folders: dict[str, Path]
    merged: dict[str, GPT]
    known: dict[tuple[str, str], list[int]] = field(default_factory=dict, init=False)

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(f"{name}={folder}" for name, folder in self.folders.items())

    def ids(self, adapter: str, prompt: str) -> list[int]:
        """By litgpt, of the merged weights; computed once."""
        if (adapter, prompt) not in self.known:
            gpt = self.merged[adapter] if adapter else self.gpt
            self.known[adapter, prompt] = greedy(gpt, encode(prompt), N_TOKENS)
        return self.known[adapter, prompt]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, gpt = tmp_path_factory.mktemp("adapters"), tiny_gpt()
    folders = {name: folder / name for name in ADAPTERS}
    merged = {name: write_adapter(folders[name], gpt, **how) for name, how in ADAPTERS.items()}
    return Made(gpt, write_checkpoint(folder / "tiny", with_end=False), folders, merged)


@contextlib.contextmanager
def run_of(made: Made, folder: Path, n_nodes: int = 1, **options: Any) -> Iterator[Run]:
    fields = {"placement": "even", "prompt_style": "none", "device": "cpu", "dtype": "float32", "wait_s": 5, **options}
    fields.setdefault("adapter", made.flags)
    with secondaries(n_nodes - 1, folder) as nodes:
        cluster = cluster_of(nodes) if nodes else standalone()
        asked = StarterOptions(**{"ckpt": made.checkpoint, "cache_dir": folder, **fields})
        with Run(GivenNodes(cluster), asked, 180, n_texts=4) as run:
            yield run


def texts(run: Run, *wanted: tuple[str, str]) -> list[list[int]]:
    """Of (adapter, prompt), all at the same time."""
    samples = [run.submit(prompt, encode(prompt), GREEDY, adapter=adapter) for adapter, prompt in wanted]
    run.read()
    return [list(sample.token_ids) for sample in samples]


EACH = [(name, prompt) for prompt in PROMPTS for name in ("", *ADAPTERS)]


@pytest.mark.parametrize("n_nodes", [1, 3])
def test_each_text_has_the_tokens_of_its_merged_weights(n_nodes: int, made: Made, tmp_path: Path) -> None:
    expected = [made.ids(*one) for one in EACH]
    assert len({tuple(ids) for ids in expected}) == len(EACH), "an adapter changes nothing"
    with run_of(made, tmp_path, n_nodes) as run:
        assert texts(run, *EACH) == expected
        assert [texts(run, one)[0] for one in EACH] == expected


WAYS: dict[str, dict[str, Any]] = {
    "int8": {"quantize": "int8", "quantize_head": "int8"},
    "int4, caches int8": {"quantize": "int4", "quantize_head": "int4", "kv_dtype": "int8"},
    "window": {"weight_memory": WindowMemory(window=WindowOptions(2))},
    "guesses": {"draft": "auto"},
    "little memory": {"kv_memory": 400_000},
}


@pytest.mark.slow
@pytest.mark.parametrize(("n_nodes", "way"), [(1, "int8"), (1, "guesses"), *((3, way) for way in WAYS)])
def test_texts_do_not_depend_on_who_shares_their_frames(n_nodes: int, way: str, made: Made, tmp_path: Path) -> None:
    with run_of(made, tmp_path / "plain", adapter=(), **WAYS[way]) as run:
        plain = [texts(run, one)[0] for one in EACH if not one[0]]
    with run_of(made, tmp_path / "all", n_nodes, **WAYS[way]) as run:
        alone = [texts(run, one)[0] for one in EACH]
        assert texts(run, *EACH) == alone
    assert [ids for (name, _), ids in zip(EACH, alone, strict=True) if not name] == plain
    if way in ("window", "guesses", "little memory"):
        assert alone == [made.ids(*one) for one in EACH]


def test_beams_are_those_of_the_merged_weights(made: Made, tmp_path: Path) -> None:
    from mdi.engine.cohort import Beams

    def best(run: Run, adapter: str) -> list[list[int]]:
        ids = encode(PROMPTS[0])
        found = run.submit_beams(PROMPTS[0], ids, GREEDY, Beams(3), on_texts=[None] * 3, adapter=adapter)
        run.read()
        return [list(sample.token_ids) for sample in found]

    with run_of(made, tmp_path / "a") as run:
        found = best(run, "all")
    merged = write_checkpoint(tmp_path / "merged", gpt=made.merged["all"], with_end=False)
    with run_of(replace(made, checkpoint=merged), tmp_path / "b", adapter=()) as run:
        assert best(run, "") == found


# Stages


def stage_of(made: Made, form: str, has_adapters: bool = True, n_threads: int = 1) -> KernelStage:
    from mdi.checkpoint.packing import Packing

    source = open_source(made.checkpoint)
    adapters = [
        open_adapter(AdapterName(name, folder), number, source.config, lambda: None)
        for number, (name, folder) in enumerate(made.folders.items(), 1)
    ]
    of = AdapterSource(adapters, lambda part: source)
    weights = Resident(source.part_names(), lambda part: source.weights(part, Packing(form, form)))
    added = {part: of.weights(part) for part in of.part_names()} if has_adapters else {}
    stage = KernelStage(spec_of(source.config), 0, 5, weights, n_threads, adapters=added)
    stage.prepare(64)
    return stage


@pytest.mark.parametrize("form", LAYOUTS)
def test_a_batch_has_the_bits_of_each_row_alone(form: str, made: Made) -> None:
    """With three adapters and none; and rows without one have those of a stage without adapters."""
    random = np.random.default_rng(5)
    rows = random.standard_normal((4, 21, made.gpt.config.n_embd)).astype(np.float32)
    seq_ids = [with_adapter(number, 7 + number) for number in range(4)]

    def computed(stage: KernelStage, *which: int) -> list[np.ndarray]:
        """Two frames: a prompt of 20 rows, then one row."""
        found: list[list[np.ndarray]] = [[] for _ in which]
        for first, n in ((0, 20), (20, 1)):
            x = np.concatenate([rows[i, first : first + n] for i in which])
            y = stage(x, [Slice(seq_ids[i], first, n) for i in which])
            for k in range(len(which)):
                found[k].append(y[k * n : k * n + n])
        for i in which:
            stage.caches.free(seq_ids[i])
        return [np.concatenate(one) for one in found]

    stage = stage_of(made, form)
    together = computed(stage, 0, 1, 2, 3)
    for i in range(4):
        assert computed(stage, i)[0].tobytes() == together[i].tobytes()
    assert computed(stage_of(made, form, n_threads=2), 3, 1, 0, 2)[2].tobytes() == together[0].tobytes()
    assert computed(stage_of(made, form, has_adapters=False), 0)[0].tobytes() == together[0].tobytes()


@pytest.mark.parametrize("form", ["float32", "int8", "int4"])
def test_an_adapter_adds_what_it_says_beside_every_format(form: str, made: Made, tmp_path: Path) -> None:
    """Against a stage whose weights are those of the format with the adapter added, as float32."""
    from mdi.checkpoint.packing import Packing, plain
    from mdi.kernels.layout import Matrix, pack

    source = open_source(made.checkpoint)
    rounded = {part: source.weights(part, Packing(form, form)) for part in source.part_names()}
    folder = made.folders["all"]
    tensors = load_file(folder / "adapter_model.safetensors")

    def merged(part: str) -> dict[str, Matrix | np.ndarray]:
        found: dict[str, Matrix | np.ndarray] = dict(plain(rounded[part]))
        for module, (layer, place) in LLAMA.items() if part.startswith("block.") else ():
            name = f"transformer.h.{part[6:]}.{layer}.weight"
            key = f"base_model.model.model.layers.{part[6:]}.{module}"
            a, b = tensors[f"{key}.lora_A.weight"].numpy(), tensors[f"{key}.lora_B.weight"].numpy()
            if form != "float32" and layer in ("attn.qkv", "mlp.fc_1", "mlp.fc_2"):  # gains are in the weights
                norm = f"transformer.h.{part[6:]}.{'norm_1' if layer == 'attn.qkv' else 'norm_2'}.weight"
                a = a * np.asarray(source.array(norm), dtype=np.float32)
            heads, groups = 48, 16
            first = {None: 0, 0: 0, 1: heads, 2: heads + groups}[place]
            weight = found[name]
            assert isinstance(weight, np.ndarray)
            weight[first : first + len(b)] += 2.0 * (b @ a)
        return {
            name: pack("float32", w) if w.ndim == 2 and name != "transformer.wte.weight" else w
            for name, w in found.items()
            if isinstance(w, np.ndarray)
        }

    reference = KernelStage(spec_of(source.config), 0, 5, Resident(source.part_names(), merged))
    reference.prepare(64)
    x = np.random.default_rng(6).standard_normal((30, made.gpt.config.n_embd)).astype(np.float32)
    stage = stage_of(made, form)
    y, z = stage(x, [Slice(with_adapter(1, 0), 0, 30)]), reference(x, [Slice(0, 0, 30)])
    without = stage(x, [Slice(1, 0, 30)])
    error, change = np.linalg.norm(y - z) / np.linalg.norm(z), np.linalg.norm(without - z) / np.linalg.norm(z)
    assert error < (1e-5 if form == "float32" else 0.03) and change > 0.5, (error, change)


# Rows that are there already


def test_no_text_continues_from_rows_of_another_adapter(made: Made, tmp_path: Path) -> None:
    """One owner, one prompt: kept prefixes and prompts of running texts are shared only with the same adapter."""
    prompt = encode(PROMPTS[1])
    names = ["", *ADAPTERS]
    with run_of(made, tmp_path, 2) as run:
        engine = run.engine

        def written(*which: str) -> list[tuple[list[int], int]]:
            """Ids, and tokens of the prompt that were not computed; all at the same time."""
            requests = [engine.submit(prompt, GREEDY, owner="me", adapter=name) for name in which]
            found = []
            for request in requests:
                ids: list[int] = []
                while True:
                    event = request.events.get(timeout=60)
                    ids += event.tokens
                    if event.finish_reason is not None:
                        break
                found.append((ids, request.n_reused))
            return found

        expected = [made.ids(name, PROMPTS[1]) for name in names]
        assert [one[0] for one in written(*names, *names)] == expected * 2
        first = [written(name)[0] for name in reversed(names)]
        assert [ids for ids, _ in reversed(first)] == expected
        assert all(n >= 32 for _, n in first), "an adapter's own rows are kept"
        with pytest.raises(UsageError, match="there is no adapter 'other'"):
            engine.submit(prompt, GREEDY, adapter="other")
    with run_of(made, tmp_path / "each", 1) as run:
        engine = run.engine
        for name, ids in zip(names, expected, strict=True):
            assert written(name) == [(ids, 0)]


@pytest.mark.parametrize("replay_memory", [0, 1 << 20], ids=["tokens", "replay"])
def test_texts_go_on_after_a_node_was_lost(replay_memory: int, made: Made, tmp_path: Path) -> None:
    from mdi.net.hello import Fault

    fields = {"placement": "even", "prompt_style": "none", "device": "cpu", "dtype": "float32"}
    options = StarterOptions(
        ckpt=made.checkpoint, cache_dir=tmp_path, adapter=made.flags, replay_memory=replay_memory, **fields
    )
    with secondaries(2, tmp_path) as nodes, Run(GivenNodes(cluster_of(nodes)), options, 180, n_texts=4) as run:
        n = 0

        def show(text: str) -> None:
            nonlocal n
            n += 1
            if n == 8:
                job = nodes[0].runs.latest
                assert job is not None and job.ring is not None
                job.ring.fail(Fault("secondary0", "its connections are dropped", "secondary0", Code.FAILED))

        wanted = [(name, PROMPTS[0]) for name in ("", *ADAPTERS)]
        samples = [run.submit(p, encode(p), GREEDY, on_text=show, adapter=name) for name, p in wanted]
        run.read()
        recoveries = run.metrics().recoveries
    assert [list(sample.token_ids) for sample in samples] == [made.ids(*one) for one in wanted]
    assert [one["restored_by"] for one in recoveries] == ["replay" if replay_memory else "tokens"]


# What is refused


def opened(made: Made, folder: Path, base: str | None = None) -> Adapter:
    source = open_source(made.checkpoint)
    return open_adapter(AdapterName("x", folder), 1, source.config, lambda: base)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, "only LORA, PROMPT_TUNING, .* are served"),
    "no rank": ({"r": None}, "rank None in"),
    "rank": ({"r": 1 << 20}, "rank 1048576 in"),
    "rank that the file does not have": ({"r": 5}, r"\[5, 64\]"),
    "scale": ({"lora_alpha": float("inf")}, "lora_alpha inf"),
    "biases": ({"bias": "all"}, "bias all"),
    "dora": ({"use_dora": True}, "use_dora True"),
    "whole layers": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "ranks": ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
    "changed weights": ({"init_lora_weights": "pissa_niter_4"}, "changed weights"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_setting_that_is_not_served_is_refused_by_name(case: str, made: Made, tmp_path: Path) -> None:
    settings, words = CONFIGS[case]
    write_adapter(tmp_path / "a", made.gpt, 1)
    told = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**told, **settings}))
    with pytest.raises(CheckpointError, match=words):
        opened(made, tmp_path / "a")


Tensors = dict[str, torch.Tensor]
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
FILES: dict[str, tuple[Any, str]] = {
    "another shape": (lambda t: t | {f"{LAYER}.lora_A.weight": torch.zeros(4, 47)}, "it is for another model"),
    "whole numbers": (lambda t: t | {f"{LAYER}.lora_A.weight": torch.zeros(4, 48, dtype=torch.int32)}, "int32"),
    "one half": (lambda t: {f"{LAYER}.lora_A.weight": torch.zeros(4, 48)}, "only one of the two"),
    "an embedding": (lambda t: t | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 48)}, "embed_tok"),
    "a block that there is not": (
        lambda t: {k.replace("layers.4", "layers.5"): v for k, v in t.items()}, "of block 5, where this model has no such",
    ),
    "an expert": (
        lambda t: {k.replace("mlp.up_proj", "mlp.experts.0.up_proj"): v for k, v in t.items()}, "experts.0.up_proj of block",
    ),
    "not finite": (lambda t: t | {f"{LAYER}.lora_A.weight": torch.full((4, 48), float("nan"))}, "not finite"),
    "nothing": (lambda t: {}, "no tensors"),
    "a name of many letters": (
        lambda t: t | {"base_model.model." + "h.0." * 20_000 + "x": torch.zeros(1)}, "which is not of a linear layer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_does_not_fit_is_refused_by_name(case: str, made: Made, tmp_path: Path) -> None:
    change, words = FILES[case]
    write_adapter(tmp_path / "a", made.gpt, 1)
    path = tmp_path / "a" / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(CheckpointError, match=words):
        AdapterSource([opened(made, tmp_path / "a")], lambda part: open_source(made.checkpoint)).weights("adapter.0")


def test_nothing_is_unpickled_and_no_head_is_believed(made: Made, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", made.gpt, 1)
    path = tmp_path / "a" / "adapter_model.safetensors"
    torch.save(load_file(path), tmp_path / "a" / "adapter_model.bin")
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        opened(made, tmp_path / "a")
    path.unlink()
    with pytest.raises(
        CheckpointError, match=r"has no adapter_model.safetensors \(files that are pickled are not read\)"
    ):
        opened(made, tmp_path / "a")


def test_the_head_of_a_strangers_file_is_short(made: Made, tmp_path: Path) -> None:
    """Other files may have longer ones. Blanks behind it are valid."""
    write_adapter(tmp_path / "a", made.gpt, 1)
    path = tmp_path / "a" / "adapter_model.safetensors"
    content = path.read_bytes()
    n = int.from_bytes(content[:8], "little")
    longer = content[8 : 8 + n].ljust(STRANGERS_LIMIT_BYTES + 8)
    path.write_bytes(len(longer).to_bytes(8, "little") + longer + content[8 + n :])
    with pytest.raises(CheckpointError):
        opened(made, tmp_path / "a")


def test_an_adapter_that_says_what_it_was_trained_on_is_compared(
    made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where that cannot be, there is a warning."""
    right = weights_hash(open_source(made.checkpoint))
    caplog.set_level("WARNING", "mdi")
    other = weights_hash(open_source(write_checkpoint(tmp_path / "other", 9)))
    assert right is not None and right != other
    write_adapter(tmp_path / "a", made.gpt, 1, metadata={BASE_KEY: right})
    opened(made, tmp_path / "a", right)
    assert not caplog.messages
    opened(made, tmp_path / "a", None)  # packed weights have other bytes
    write_adapter(tmp_path / "b", made.gpt, 1)
    opened(made, tmp_path / "b", right)
    told = "warning: adapter x: not known whether it was trained on these weights: "
    assert caplog.messages == [f"{told}this model's are packed", f"{told}its file does not name them"]
    with pytest.raises(CheckpointError, check=lambda e: e.code == "adapter"):
        opened(made, tmp_path / "a", other)


def test_the_hash_is_that_of_all_that_an_adapter_adds(made: Made, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", made.gpt, 1)
    path, config = tmp_path / "a" / "adapter_model.safetensors", tmp_path / "a" / "adapter_config.json"
    hashes = {opened(made, tmp_path / "a").sha256}
    tensors = load_file(path)
    tensors[f"{LAYER}.lora_B.weight"][3, 2] += 1
    save_file(tensors, path)
    hashes.add(opened(made, tmp_path / "a").sha256)
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 9}))
    hashes.add(opened(made, tmp_path / "a").sha256)
    assert len(hashes) == 3


@pytest.mark.parametrize("text", ["sql", "=/tmp", "a b=/tmp", "../x=/tmp", "a/b=/tmp", f"{'a' * 101}=/tmp", "a="])
def test_a_name_is_no_path(text: str) -> None:
    with pytest.raises(UsageError, match="expected NAME=DIR"):
        adapter_names([text])


def test_a_folder_without_a_name_gives_its_own(made: Made, tmp_path: Path) -> None:
    folder, side = tmp_path / "polite", tmp_path / "side"
    write_adapter(folder, made.gpt, 1)
    options = StarterOptions(adapter=(str(folder), f"other={side}"))
    assert options.in_peft_form == (f"polite={folder}", f"other={side}") and options.sides == {}
    alone = StarterOptions(adapter=(str(side),))
    assert alone.sides == {"": side} and not alone.in_peft_form and not alone.named_adapters
    with pytest.raises(UsageError, match="--adapter: .* give NAME=DIR"):
        _ = StarterOptions(adapter=(str(folder), str(side))).sides
    side.mkdir()
    (side / SIDE_FILE).touch()
    assert options.in_peft_form == (f"polite={folder}",) and options.sides == {"other": side}
    assert options.named_adapters == (f"polite={folder}", f"other={side}")


def test_names_are_different_and_not_too_many() -> None:
    assert [one.name for one in adapter_names(["a=x", "b:1=x=y"])] == ["a", "b:1"]
    with pytest.raises(UsageError, match="two have the name a"):
        adapter_names(["a=x", "a=y"])
    with pytest.raises(UsageError, match="65 adapters"):
        adapter_names([f"a{i}=x" for i in range(65)])


REFUSED: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "shares": (2, {}, {"parallel": ParallelOptions(mode="tensor")}, "use --parallel ring"),
    "a starter in torch": (2, {}, {"dtype": "bfloat16"}, "adapters are for nodes with whole blocks"),
    "a node in torch": (
        2,
        {"dtype": "bfloat16"},
        {},
        "secondary0 computes .*, and adapters are for nodes with whole blocks",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_adapters_cannot_do_is_refused_before_weights_are_sent(case: str, made: Made, tmp_path: Path) -> None:
    n_nodes, of_node, options, words = REFUSED[case]
    fields = {"placement": "even", "prompt_style": "none", "device": "cpu", **options}
    asked = StarterOptions(ckpt=made.checkpoint, cache_dir=tmp_path, adapter=made.flags, **fields)
    with (
        secondaries(n_nodes - 1, tmp_path, **of_node) as nodes,
        pytest.raises(MdiError, match=words),
        Run(GivenNodes(cluster_of(nodes)), asked, 60, n_texts=1),
    ):
        pass
    assert not [*tmp_path.glob("cache*/*.safetensors")]


def test_weights_without_their_gains_are_refused_by_name(made: Made, tmp_path: Path) -> None:
    from mdi.checkpoint.chunks import write_chunks
    from mdi.checkpoint.derived import PackedSource
    from mdi.checkpoint.packing import Packing

    source = open_source(made.checkpoint)
    (chunk,) = write_chunks(PackedSource(source, Packing("int8", "int8")), tmp_path / "tiny", (5,))
    packed = open_source(chunk)
    with pytest.raises(CheckpointError, check=lambda e: e.code == "adapter"):
        AdapterSource([opened(made, made.folders["all"])], lambda part: packed)
    write_adapter(tmp_path / "a", made.gpt, 1, modules=["self_attn.o_proj", "mlp.down_proj"])
    assert AdapterSource([opened(made, tmp_path / "a")], lambda part: packed).part_names()[0] == "adapter.0"


def test_a_node_checks_the_adapters_that_it_gets(made: Made) -> None:
    from mdi.checkpoint.adapters import check_stored
    from mdi.checkpoint.safetensors_layout import TensorSpec

    source = open_source(made.checkpoint)
    of = AdapterSource([opened(made, made.folders["all"])], lambda part: source)
    specs, config = of.part_specs("adapter.2"), source.config
    check_stored(specs, "adapter.2", config, "it")
    name = "transformer.h.2.attn.qkv.1.0"
    a, b = f"{name}.a", f"{name}.b"
    for change in (
        {a: TensorSpec("F32", (4, 49))}, {a: TensorSpec("F16", (4, 48))}, {a: TensorSpec("F32", (5, 48))},
        {b: TensorSpec("F32", (4, 81))}, {b: TensorSpec("F32", (4, 0))}, {b: TensorSpec("F32", (4,))},
        {a: TensorSpec("F32", (257, 48)), b: TensorSpec("F32", (257, 48))},
        {"transformer.h.2.attn.qkv.2.0.a": TensorSpec("F32", (4, 48))},
        {k.replace("qkv.1.", "qkv.65."): v for k, v in specs.items()},
        {k.replace("h.2", "h.3"): v for k, v in specs.items()}, {"transformer.wte.weight": TensorSpec("F32", (4, 48))},
        {"transformer.h.2.norm_1.gain": TensorSpec("F32", (47,))},
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"^it: transformer\.\S+, \[[0-9, ]+\], "):
            check_stored({**specs, **change}, "adapter.2", config, "it")
    weights = of.weights("adapter.2")
    with pytest.raises(CheckpointError, check=lambda e: e.code == "adapter"):
        low_rank(weights, 2, lambda norm: np.full(48, 3, dtype=np.float32), spec_of(config))
    stage_weights = Resident(source.part_names(), lambda part: source.weights(part))
    weights[a] = weights[a][:, :40].copy()
    with pytest.raises(KernelError, match=r"\(4, 40\)"):
        KernelStage(spec_of(config), 0, 5, stage_weights, adapters={"adapter.2": weights})


def test_a_request_lists_adapters_of_its_blocks_only(made: Made, tmp_path: Path) -> None:
    from mdi.control.messages import InitRequest
    from mdi.kernels import LAYOUT_VERSION

    source = open_source(made.checkpoint)
    part = {"sha256": "a" * 64, "n_bytes": 10}
    body = InitRequest(
        "0" * 16, "1" * 16, 1, ("a", "b"), "p", "127.0.0.1", 1, source.model_id, (1, 3), (), Extent(60)
    ).to_json()  # fmt: skip
    assert body["layout_version"] == LAYOUT_VERSION

    def asked(*names: str) -> InitRequest:
        parts = [{"name": name, **part} for name in names]
        return InitRequest.from_json({**body, "parts": parts, "device": None, "dtype": None})

    assert len(asked("block.1", "block.2", "adapter.2").parts) == 3
    for names in (("adapter.3",), ("adapter.0",), ("adapter.01",), ("adapter.x",), ("adapter.2", "adapter.2")):
        with pytest.raises(ControlError, match="do not match blocks 1-2"):
            asked("block.1", "block.2", *names)
    with pytest.raises(ControlError, match="do not follow"):
        asked("block.1", "adapter.1", "block.2")
