"""An embedding that is the head as well: one weight in memory, in the cache folder, in chunks and in the plan."""

from __future__ import annotations

import contextlib
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from litgpt.model import GPT

import mdi.checkpoint.kept_packed as kept_packed
from adapter_files import write_adapter
from families import greedy, random_gpt
from mdi.checkpoint.derived import CastSource, PackedSource
from mdi.checkpoint.mixtures import meant
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.shapes import packed_bytes
from mdi.checkpoint.source import LitCheckpoint, open_source
from mdi.checkpoint.store import BlockStore
from mdi.cli import launch
from mdi.engine.sequence import SamplingParams
from mdi.errors import UsageError
from mdi.host.computing import Requested, choose_computing
from mdi.kernels import library
from mdi.kernels.format_maps import format_map, shown
from mdi.kernels.layout import Matrix, matrix_bytes, unpack
from mdi.kernels.weight_formats import tied_form, untied_form
from mdi.model.tensors import EMBEDDING, HEAD
from mdi.placement.model import model_shape
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.extent import Extent
from mdi.spec.options import ParallelOptions, StarterOptions
from mdi.spec.window import WindowMemory, WindowOptions
from mdi.stages.building import torch_weights
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.spec import StageSpec
from mdi.stages.window import StoredParts
from mdi.stages.window_files import PanelTable, WeightBytes
from secondaries import cluster_of, secondaries
from test_mixed_runs import alone
from tiny_checkpoint import encode, tiny_config, write_checkpoint
from tiny_models import tiny_state, write_lit

needs_kernels = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

N_TOKENS = 8
PROMPTS = ("The ring", "Every node keeps a cache for each sequence. " * 4)
TIE = ";transformer.wte=tied"


@functools.cache
def tied_gpt() -> GPT:
    gpt = random_gpt(tiny_config(head_size=16, n_head=4, n_query_groups=2), 4)
    gpt.lm_head.weight = gpt.transformer.wte.weight
    return gpt


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tied") / "tiny", gpt=tied_gpt(), with_end=False)


@pytest.fixture
def small_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_packed, "LEAST_BYTES", 0)


def opened(nodes: Any, folder: Path, cache: Path, **options: Any) -> Run:
    fields: dict[str, Any] = {
        "placement": "even",
        "prompt_style": "none",
        "device": "cpu",
        "cache_dir": cache,
        "wait_s": 5,
    }
    fields["quantize_head"] = options.get("quantize")
    asked = StarterOptions(ckpt=folder, **{**fields, **options})
    return Run(GivenNodes(cluster_of(nodes) if nodes else alone()), asked, 120, n_texts=2 * len(PROMPTS))


def ids(nodes: Any, folder: Path, cache: Path, adapters: tuple[str, ...] = ("",), **options: Any) -> list[list[int]]:
    """The greedy ids of all texts, with each adapter."""
    with opened(nodes, folder, cache, **options) as run:
        greedy_ids = SamplingParams(N_TOKENS, temperature=0)
        texts = [run.submit(one, encode(one), greedy_ids, adapter=name) for name in adapters for one in PROMPTS]
        run.read()
        return [list(text.token_ids) for text in texts]


def test_which_formats_are_one() -> None:
    for form, dtype in (("int8", "float32"), ("bf16", "bfloat16"), ("float32", "bfloat16"), ("fp16", "float16")):
        assert tied_form(form, dtype) == form + TIE
        assert untied_form(form + TIE) == f"{form};transformer.wte={form}"
        assert tied_form(form + TIE, dtype) == form + TIE and shown(form + TIE) == form
    assert tied_form("int4;lm_head=q6_k;transformer.wte=q6_k", "float32") == "int4;lm_head=q6_k" + TIE
    for form in ("int4", "mxfp4", "bf16", "int8;transformer.wte=bf16", "q8_0"):  # a table of other numbers
        assert tied_form(form, "float32") == form == untied_form(form)
    assert format_map("int8" + TIE).of_part("head") == "int8" + TIE, (
        "a head whose norm is not folded has a name of its own"
    )
    assert format_map("int8" + TIE).of_part("block.0") == "int8"


@pytest.mark.parametrize(
    "form", ["tied", "int8;lm_head=tied", "int8;transformer.wte=tied*16+int8", "int8;attn.qkv@0=tied"]
)
def test_only_an_embedding_can_be_the_head(form: str) -> None:
    with pytest.raises(UsageError, match=re.escape(form)):
        format_map(form)


def test_other_weights_stay_two(tmp_path: Path) -> None:
    config, state = tiny_state()
    assert LitCheckpoint(write_lit(tmp_path / "two", config, state)).tied_type is None
    state[HEAD] = state[EMBEDDING]
    source = LitCheckpoint(write_lit(tmp_path / "one", config, state))
    assert source.tied_type == "float32" and CastSource(source, "bfloat16").tied_type == "bfloat16"
    assert PackedSource(source, Packing("int8", "int8")).tied_type is None
    assert PackedSource(source, Packing("int8", "int8").tied("float32")).tied_type == "float32"


@needs_kernels
@pytest.mark.parametrize("word", ["float32", "int8", "q6_k", "q4_k"])
def test_its_memory_and_its_bytes_are_there_once(word: str, tmp_path: Path) -> None:
    """And its rows are those of the head, which has the checkpoint's numbers and not their products with the final norm."""
    sizes = {"n_embd": 256, "head_size": 32, "n_head": 8, "n_query_groups": 2, "intermediate_size": 256, "n_layer": 1}
    config, state = tiny_state(**sizes)
    state[HEAD] = state[EMBEDDING]
    source = LitCheckpoint(write_lit(tmp_path, config, state))
    form = meant(word, source.config)
    tied = Packing(form, form).tied(source.tied_type)
    parts = ("embedding", "block.0", "head")
    one, two = (PackedSource(source, packing) for packing in (tied, tied.untied))
    table = matrix_bytes(tied.format_of(HEAD, state[HEAD].shape) or "", *state[HEAD].shape)
    assert sum(map(two.n_bytes, parts)) - sum(map(one.n_bytes, parts)) >= table
    resident = Resident(parts, one.weights)
    both = Resident(parts, lambda part: one.weights(part, tied.untied))  # as a node of a group has it
    assert both.n_bytes - resident.n_bytes == table
    head = resident["head"][HEAD]
    assert isinstance(head, Matrix) and EMBEDDING not in resident["embedding"]
    wanted, found = state[HEAD].numpy(), unpack(head)
    assert np.abs(found - wanted).max() <= np.abs(wanted).max() * (0 if word == "float32" else 0.05)
    places = np.array([5, 0, 5, len(wanted) - 1])
    stage = KernelStage(source.spec, 0, 1, resident)
    assert np.array_equal(stage.embed(places), found[places])
    other = KernelStage(source.spec, 0, 1, both)
    rows = stage.embed(np.arange(len(wanted)))
    assert np.array_equal(rows, other.embed(np.arange(len(wanted)))) and np.array_equal(
        stage.head(rows), other.head(rows)
    )
    for again in (Packing("int4", "int4"), Packing("int8", "int8"), tied.untied):  # of a part that is packed so already
        weights = one.weights("embedding", again)
        assert EMBEDDING in weights, "the head stands for it"
    tensors = one.tensors("embedding")
    assert np.array_equal(tensors[EMBEDDING].numpy(), found)


@needs_kernels
@pytest.mark.parametrize("form", ["float32", "int8"])
def test_the_plan_counts_it_once(form: str, checkpoint: Path) -> None:
    source = open_source(checkpoint)
    tied, two = (model_shape(source.config, form, tied_type=tied) for tied in (source.tied_type, None))
    assert tied.is_tied and tied.embedding_bytes == 0 and tied.head_bytes == two.head_bytes
    assert two.weight_bytes - tied.weight_bytes == two.embedding_bytes > 0
    held = Packing(form, form).tied(source.tied_type).head
    of_parts = [packed_bytes(source.config, "", ["embedding", "head"], one) for one in (held, form)]
    assert of_parts[1] - of_parts[0] == two.embedding_bytes
    assert model_shape(source.config, "int4", tied_type=source.tied_type).embedding_bytes > 0, "it has other numbers"


@needs_kernels
@pytest.mark.usefixtures("small_parts_too")
@pytest.mark.parametrize("form", [None, "int8"])
def test_the_cache_folder_has_it_once(form: str | None, checkpoint: Path, tmp_path: Path) -> None:
    wanted = ids([], checkpoint, tmp_path, quantize=form)
    store = BlockStore(tmp_path)
    names = [store.path(sha).read_bytes()[:4096] for sha in store.parts()]
    assert sum(EMBEDDING.encode() in head for head in names) == 0 and sum(HEAD.encode() in head for head in names) == 1
    assert len(names) == 1 + tied_gpt().config.n_layer  # an embedding that has nothing of its own is no file
    assert ids([], checkpoint, tmp_path, quantize=form) == wanted and len(store.parts()) == len(names)


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ring": (3, {}),
    "group": (2, {"parallel": ParallelOptions("tensor", is_head_shared=True)}),
    "group, whole head": (3, {"parallel": ParallelOptions("tensor", (1.0, 0.0, 1.0))}),
    "window": (1, {"weight_memory": WindowMemory(window=WindowOptions(2))}),
    "torch": (1, {"dtype": "float32"}),
}


@needs_kernels
@pytest.mark.parametrize("form", [None, "int8"])
@pytest.mark.parametrize("way", WAYS)
def test_ids_do_not_depend_on_the_nodes(
    way: str, form: str | None, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_nodes, options = WAYS[way]
    wanted = [greedy(tied_gpt(), encode(text), N_TOKENS) for text in PROMPTS]
    if form is not None:
        wanted = ids([], checkpoint, tmp_path / "alone", quantize=form)
    if way == "torch":
        monkeypatch.setattr("mdi.host.computing.why_torch", lambda *args: "not here")
    with secondaries(n_nodes - 1, tmp_path) as nodes:
        found = ids(nodes, checkpoint, tmp_path, quantize=form, **options)
    if form is not None and ("parallel" in options or way == "torch"):  # activations are rounded otherwise
        assert [len(text) for text in found] == [N_TOKENS] * len(PROMPTS)
    else:
        assert found == wanted


@needs_kernels
def test_a_group_has_the_same_numbers_in_both_places(checkpoint: Path, tmp_path: Path) -> None:
    with (
        secondaries(1, tmp_path) as nodes,
        opened(
            nodes, checkpoint, tmp_path, quantize="int8", parallel=ParallelOptions("tensor", is_head_shared=True)
        ) as run,
    ):
        packing = run.model.weights.groups[0].packing
    assert packing == Packing("int8", "int8;transformer.wte=int8")
    source = open_source(checkpoint)
    whole = PackedSource(source, Packing("int8", "int8").tied("float32")).weights("head")
    other = PackedSource(source, packing)
    for name, part in ((EMBEDDING, "embedding"), (HEAD, "head")):
        assert np.array_equal(other.weights(part)[name].data, whole[HEAD].data)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("form", ["int8", None])
def test_chunks_have_it_once(
    form: str | None, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "tiny", gpt=tied_gpt(), with_end=False)
    flags = [] if form is None else ["--quantize", form]
    assert launch("prepare-model", [str(folder), "--n-nodes", "3", *flags]) == 0
    (starter,) = folder.glob("chunks/*/model_starter.safetensors")
    assert open_source(starter).tied_type == "float32" and EMBEDDING not in open_source(starter).specs
    wanted = ids([], checkpoint, tmp_path / "alone", quantize=form)
    with secondaries(2, tmp_path) as nodes:
        assert ids(nodes, folder, tmp_path, quantize=form) == wanted
    with secondaries(2, tmp_path) as nodes:  # weights of a group are cut out of it
        parallel = ParallelOptions("tensor", is_head_shared=True)
        found = ids(nodes, folder, tmp_path, quantize=form, parallel=parallel, layers=None)
    assert found == wanted if form is None else [len(text) for text in found] == [N_TOKENS] * len(PROMPTS)
    capsys.readouterr()


@needs_kernels
def test_adapters_add_to_it(checkpoint: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", tied_gpt(), 2)
    flags = (f"one={tmp_path / 'one'}",)
    found = ids([], checkpoint, tmp_path / "alone", ("", "one"), quantize="int8", adapter=flags)
    assert found[: len(PROMPTS)] != found[len(PROMPTS) :]
    with secondaries(2, tmp_path) as nodes:
        assert ids(nodes, checkpoint, tmp_path, ("", "one"), quantize="int8", adapter=flags) == found


def test_nobody_asks_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model whose head is another weight, rows of the head would be embedded."""
    for command, flag in (("run", "--quantize-head"), ("prepare-model", "--quantize")):
        assert launch(command, ["a-model", flag, f"int8{TIE}"]) == 2
        assert "follows from the model" in capsys.readouterr().err


@needs_kernels
@pytest.mark.parametrize("form", ["int8", None])
def test_torch_holds_two_weights_of_a_chunk_and_counts_them(
    form: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mdi.host.computing.why_torch", lambda *args: "not here")
    folder = write_checkpoint(tmp_path / "tiny", gpt=tied_gpt(), with_end=False)
    flags = [] if form is None else ["--quantize", form]
    assert launch("prepare-model", [str(folder), "--n-nodes", "1", *flags]) == 0
    capsys.readouterr()
    (path,) = folder.glob("chunks/*/model_starter.safetensors")
    with contextlib.closing(open_source(path)) as chunk:
        assert chunk.packing is not None and chunk.packing.is_tied
        asked = Requested(device="cpu", quantize=form, quantize_head=form and chunk.packing.head)
        computing = choose_computing(chunk.config, asked, chunk.dtype, chunk.packing.blocks)
        assert computing.packing is None
        found = {**torch_weights(chunk, "embedding", computing), **torch_weights(chunk, "head", computing)}
        assert all(isinstance(found[name], Matrix) == (form == "int8") for name in (EMBEDDING, HEAD))
        parts = tuple(chunk.info(name) for name in chunk.part_names())
        extent = Extent(64, 1, kv_dtype="float32")
        spec = StageSpec("starter", chunk.model_id, (0, chunk.spec.n_layer), parts, computing, None, None, 2, extent)
        (head,) = (part.n_bytes for part in parts if part.name == "head")
        assert spec.weight_bytes({}) >= 0.95 * (sum(part.n_bytes for part in parts) + head)


@needs_kernels
def test_a_window_reads_each_panel_once(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = PackedSource(open_source(checkpoint), Packing("int8", "int8").tied("float32"))
    parts = StoredParts(source.packing, tmp_path)
    stored = parts.part(source, "head").matrices[HEAD]
    parts.finish()
    ids, read, plainly = np.array([5, 40, 5, 17, 4, 95]), [], WeightBytes.read

    def reading(file: WeightBytes, *at: int) -> Any:
        read.append(at)
        return plainly(file, *at)

    monkeypatch.setattr(WeightBytes, "read", reading)
    found = PanelTable(stored)[ids]
    assert np.array_equal(found, unpack(source.weights("head")[HEAD])[ids]) and len(read) == len(set(ids // 16))
    parts.close()
