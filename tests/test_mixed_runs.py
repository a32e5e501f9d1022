"""Runs of models whose matrices are in several formats: alone, in rings, in groups, in windows, from chunks and GGUF files."""

from __future__ import annotations

import functools
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from litgpt.model import GPT

from families import greedy, random_gpt
from gguf_files import byte_level_tokens, gguf_families, write_gguf
from mdi.checkpoint.chunks import find_chunk
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.gguf import read_gguf, read_rows
from mdi.checkpoint.ggufsource import GgufSource, gguf_directory
from mdi.checkpoint.packing import Packing, plain
from mdi.cli import launch
from mdi.engine.sequence import SamplingParams
from mdi.kernels import library
from mdi.kernels.format_maps import format_map
from mdi.kernels.layout import Matrix, pack, unpack
from mdi.kernels.weight_formats import packed_form_of
from mdi.model.tensors import EMBEDDING, HEAD
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.spec.options import ParallelOptions, StarterOptions
from mdi.spec.window import WindowMemory, WindowOptions
from mdi.stages.model_family import ModelFamily
from secondaries import cluster_of, secondaries
from tiny_checkpoint import encode, tiny_config, tokenizer, write_checkpoint
from tiny_models import tiny_state

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

# Formats of floats alone, whose products with float32 rows are not rounded: litgpt's model with these weights is the reference.
FLOATS = "float32;attn.qkv=fp16*32+bf16*32+float32;lm_head=fp16;mlp.proj@1,3=bf16;transformer.wte=bf16"
ROUNDED = "int4;attn.qkv=int4*64+int8;lm_head=int8;mlp.proj@0,2=int8;transformer.wte=int8"
N_TOKENS = 8
PROMPTS = ("The ring", "Every node keeps a cache for each sequence. " * 4)


@functools.cache
def tiny() -> GPT:
    """Heads of 16 numbers: 64 rows of queries, 32 of keys, 32 of values."""
    return random_gpt(tiny_config(head_size=16, n_head=4, n_query_groups=2), 4)


@functools.cache
def expected(text: str) -> list[int]:
    """What litgpt's model generates with the weights that FLOATS keeps."""
    state = {name: tensor.clone() for name, tensor in tiny().state_dict().items()}
    for name, tensor in state.items():
        form = packed_form_of(FLOATS, name, tuple(tensor.shape))
        if form is not None:
            state[name] = torch.from_numpy(unpack(pack(form, tensor.numpy())))
    gpt = GPT(tiny().config).eval().requires_grad_(False)
    gpt.load_state_dict(state)
    return greedy(gpt, encode(text), N_TOKENS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mixed") / "tiny", gpt=tiny(), with_end=False)


def ids(cluster: ClusterConfig, folder: Path, cache: Path, **options: Any) -> list[list[int]]:
    """The greedy ids of all texts."""
    fields: dict[str, Any] = {
        "placement": "even",
        "prompt_style": "none",
        "device": "cpu",
        "cache_dir": cache,
        "wait_s": 5,
    }
    asked = StarterOptions(ckpt=folder, **{**fields, **options})
    starter = Run(GivenNodes(cluster), asked, 120, n_texts=len(PROMPTS))
    try:
        starter.open()
        texts = [starter.submit(text, encode(text), SamplingParams(N_TOKENS, temperature=0)) for text in PROMPTS]
        starter.read()
        starter.close()
        return [list(text.token_ids) for text in texts]
    finally:
        starter.close()


def alone() -> ClusterConfig:
    return ClusterConfig(NodeConfig("starter", "127.0.0.1", 0, 0), ())


@pytest.mark.slow
@pytest.mark.parametrize(
    "n_nodes, options",
    [
        (1, {}),
        (3, {}),
        (3, {"layers": "1,3,1"}),
        (2, {"parallel": ParallelOptions("tensor", is_head_shared=True)}),
        (3, {"parallel": ParallelOptions("tensor", (1.0, 0.0, 1.0))}),
        (1, {"weight_memory": WindowMemory(window=WindowOptions(2))}),
        (2, {"weight_memory": WindowMemory(window=WindowOptions(2))}),
    ],
    ids=["alone", "ring", "ring by hand", "group", "group of unequal shares", "window", "window in a ring"],
)
@pytest.mark.parametrize("form", [FLOATS, ROUNDED], ids=["floats", "rounded"])
def test_ids_do_not_depend_on_the_nodes(
    form: str, n_nodes: int, options: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    if form == FLOATS:
        wanted = [expected(text) for text in PROMPTS]
    else:
        wanted = ids(alone(), checkpoint, tmp_path / "alone", quantize=form, quantize_head=form)
    with secondaries(n_nodes - 1, tmp_path) as nodes:
        cluster = cluster_of(nodes) if nodes else alone()
        found = ids(cluster, checkpoint, tmp_path, quantize=form, quantize_head=form, **options)
    if "parallel" in options and form == ROUNDED:  # sums over a group round rows anew
        assert [len(text) for text in found] == [N_TOKENS] * len(PROMPTS)
    else:
        assert found == wanted


def test_chunks_of_a_mixture_give_the_same(checkpoint: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", gpt=tiny(), with_end=False)
    assert launch("prepare-model", [str(folder), "--n-nodes", "2", "--quantize", ROUNDED]) == 0
    assert find_chunk(folder, 2, "starter", ROUNDED).is_file()
    wanted = ids(alone(), checkpoint, tmp_path / "alone", quantize=ROUNDED, quantize_head=ROUNDED)
    with secondaries(1, tmp_path) as nodes:
        assert ids(cluster_of(nodes), folder, tmp_path, quantize=ROUNDED) == wanted


# GGUF files that mix types


def kind_of(name: str) -> str:
    """As llama.cpp mixes them: values and some down-projections in more bits, and the head."""
    if name in ("token_embd.weight", "output.weight"):
        return "Q8_0"
    if "attn_v" in name or name == "blk.0.ffn_down.weight":
        return "F16"
    return "BF16" if "attn_k" in name else "Q4_0"


@pytest.fixture(scope="module")
def mixed_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(n_embd=64, head_size=16, n_head=4, n_query_groups=2, intermediate_size=96)
    path = tmp_path_factory.mktemp("gguf") / "mixed.gguf"
    tokens = byte_level_tokens(json.loads(tokenizer().to_str()), **{"tokenizer.ggml.eos_token_id": 0})
    return write_gguf(path, "Llama-3.1-8B", config, random_gpt(config, 4).state_dict(), kind_of, tokens=tokens)


def test_a_file_says_its_formats(mixed_gguf: Path) -> None:
    found = format_map(GgufSource(mixed_gguf).own_formats or "")
    assert found.at("transformer.h.1.attn.qkv.weight") == "int4*64+bf16*32+fp16"
    assert (found.at("transformer.h.0.mlp.proj.weight"), found.at("transformer.h.1.mlp.proj.weight")) == (
        "fp16",
        "int4",
    )


def test_its_numbers_are_kept(mixed_gguf: Path) -> None:
    """What the kernels read stands for what gguf's own reader gives, but for types that they lack."""
    source = GgufSource(mixed_gguf)
    assert source.own_formats is not None
    packed = PackedSource(source, Packing(source.own_formats, source.own_formats))
    tensors, n_compared = read_gguf(mixed_gguf).tensors, 0
    for block in (0, 1):
        weights = packed.weights(f"block.{block}")
        for ours, theirs in (("mlp.fc_1", "ffn_gate"), ("mlp.proj", "ffn_down"), ("attn.proj", "attn_output")):
            tensor = tensors[f"blk.{block}.{theirs}.weight"]
            matrix = weights[f"transformer.h.{block}.{ours}.weight"]
            assert isinstance(matrix, Matrix)
            plain = dequantize(read_rows(tensor), Kind[tensor.type_name]).reshape(tensor.shape)
            assert np.array_equal(unpack(matrix), plain)
            n_compared += 1
        qkv = weights[f"transformer.h.{block}.attn.qkv.weight"]
        assert isinstance(qkv, Matrix)
        value = tensors[f"blk.{block}.attn_v.weight"]
        assert np.array_equal(unpack(qkv)[-32:], dequantize(read_rows(value), Kind.F16).reshape(value.shape))
    assert n_compared == 6


@pytest.mark.parametrize("family", gguf_families())
def test_files_of_all_families_keep_their_numbers(family: str, tmp_path: Path) -> None:
    """A type for each tensor by its name's hash; the plain numbers of a file are rounded to half precision."""
    experts = {"moe_intermediate_size": 64} if family == "Qwen3-30B-A3B" else {}
    sizes = {"n_embd": 64, "head_size": 16, "n_head": 4, "n_query_groups": 2, "intermediate_size": 64, **experts}
    config, state = tiny_state(family, **sizes)
    kinds = ("Q8_0", "Q4_0", "Q5_0", "Q4_1", "F16")
    path = tmp_path / "mixed.gguf"
    write_gguf(path, family, config, state, lambda name: kinds[zlib.crc32(name.encode()) % len(kinds)])
    source = GgufSource(path)
    assert source.own_formats is not None
    packed = PackedSource(source, Packing(source.own_formats, source.own_formats))
    found = {name: array for part in packed.part_names() for name, array in plain(packed.weights(part)).items()}
    assert found.keys() == source.specs.keys()
    for name, array in found.items():
        exact = source.tensor(name).float().numpy()
        assert np.abs(array - exact).max() <= 2**-11 * np.abs(exact).max(), name


def test_a_tied_table_of_a_file_is_its_head(tmp_path: Path) -> None:
    config, state = tiny_state("Gemma-3-1b-it", n_embd=64)
    path = write_gguf(tmp_path / "tied.gguf", "Gemma-3-1b-it", config, state, "Q4_0")
    source, table = GgufSource(path), read_gguf(path).tensors["token_embd.weight"]
    assert source.own_formats is not None
    packing = Packing(source.own_formats, source.own_formats).tied(source.tied_type)
    packed = PackedSource(source, packing)
    assert packing.is_tied and EMBEDDING not in packed.weights("embedding") and not packed.part_specs("embedding")
    numbers = dequantize(read_rows(table), Kind.Q4_0).reshape(table.shape)
    assert np.array_equal(plain(packed.weights("head"))[HEAD], numbers)


@pytest.mark.parametrize("n_nodes", [1, 3])
@pytest.mark.parametrize("how", ["own", "auto"])
def test_a_file_runs_at_its_own_bits(how: str, n_nodes: int, mixed_gguf: Path, tmp_path: Path) -> None:
    folder = gguf_directory(mixed_gguf, tmp_path / "store")
    source = GgufSource(mixed_gguf)
    own = source.own_formats
    wanted = ids(alone(), folder, tmp_path / "alone", quantize=own, quantize_head=own)
    with secondaries(n_nodes - 1, tmp_path) as nodes:
        cluster = cluster_of(nodes) if nodes else alone()
        assert ids(cluster, folder, tmp_path, quantize=how) == wanted


def test_it_is_stored_and_sent_at_its_own_bits(mixed_gguf: Path, tmp_path: Path) -> None:
    weights = ModelFamily().open_weights(gguf_directory(mixed_gguf, tmp_path), None, 2, None, None, False)
    plain = weights.part_bytes("block.1")
    weights.take_format(weights.own_formats, tmp_path)
    assert weights.model.format == weights.own_formats == weights.quantize
    assert weights.part_bytes("block.1") < 0.6 * plain
    weights.take_format("int8", tmp_path)
    assert weights.model.format is None and weights.part_bytes("block.1") == plain
    weights.close()


@pytest.mark.parametrize("how", ["own", "auto"])
def test_a_run_remembers_its_format_as_an_option(how: str, mixed_gguf: Path, tmp_path: Path) -> None:
    """What --resume finds in the journal must be a format that can be asked for."""
    folder = gguf_directory(mixed_gguf, tmp_path / "store")
    asked = StarterOptions(ckpt=folder, prompt_style="none", device="cpu", placement="even", quantize=how)
    with Run(GivenNodes(alone()), asked, 20, n_texts=1) as run:
        assert run.model.formats == ("own", "own")
        run.close()


@pytest.mark.parametrize("n_nodes", [1, 2])
def test_torch_unpacks_it(n_nodes: int, mixed_gguf: Path, tmp_path: Path) -> None:
    """Where the kernels do not compute, its numbers are those of the file in the type that is computed in."""
    folder = gguf_directory(mixed_gguf, tmp_path / "store")
    wanted = ids(alone(), folder, tmp_path / "alone", dtype="float16")
    with secondaries(n_nodes - 1, tmp_path) as nodes:
        cluster = cluster_of(nodes) if nodes else alone()
        assert ids(cluster, folder, tmp_path, quantize="own", dtype="float16") == wanted
