"""LoRA, prompts and gradients over weights in several formats, and over the block types of GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from litgpt.model import GPT

from adapter_files import write_adapter
from families import greedy, random_gpt
from gguf_files import byte_level_tokens, write_gguf
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.ggufsource import GgufSource, gguf_directory
from mdi.checkpoint.packing import Packing, plain
from mdi.engine.sequence import SamplingParams
from mdi.kernels import library
from mdi.kernels.layout import pack, unpack
from mdi.kernels.weight_formats import BLOCK_TYPES, packed_form_of
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from mdi_training.ring_blocks import RingBlocks
from mdi_training.tuned_tensors import TuningKind, new_tensors
from secondaries import cluster_of, secondaries
from test_mixed_runs import FLOATS
from test_ring_training import EVERY, LENGTH, METHODS, alike, behind_prompt, draw, exact, reference
from tiny_checkpoint import encode, tiny_config, tokenizer, write_checkpoint

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

N_TOKENS = 10
PROMPTS = ("The ring", "Every node keeps a cache for each sequence. " * 3)
SIZES = {"n_embd": 64, "head_size": 16, "n_head": 4, "n_query_groups": 2, "intermediate_size": 96, "n_layer": 3}
TYPES = ("Q8_0", "Q4_1", "Q5_0", "Q5_1", "Q4_0")  # that the gguf package writes


def kind_of(name: str) -> str:
    """Each matrix of a block has its own type, and those of the next block other ones."""
    if not name.startswith("blk."):
        return "Q8_0"
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    _, block, kind, _ = name.split(".")
    return TYPES[(int(block) + names.index(kind)) % len(TYPES)]


@pytest.fixture(scope="module")
def tiny() -> GPT:
    return random_gpt(tiny_config(**SIZES), 4)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, tiny: GPT) -> Path:
    """The folder of a GGUF file in these types."""
    folder = tmp_path_factory.mktemp("types")
    tokens = byte_level_tokens(json.loads(tokenizer().to_str()), **{"tokenizer.ggml.eos_token_id": 319})
    path = write_gguf(folder / "m.gguf", "Llama-3.1-8B", tiny.config, tiny.state_dict(), kind_of, tokens=tokens)
    assert {Kind[one].name.lower() for one in TYPES} - {"q4_0"} <= set(BLOCK_TYPES)
    return gguf_directory(path, folder)


def options_of(folder: Path, cache: Path, **changes: Any) -> StarterOptions:
    fields = {"prompt_style": "none", "device": "cpu", "placement": "even", "wait_s": 5, **changes}
    return StarterOptions(ckpt=folder, cache_dir=cache, **fields)


def texts(folder: Path, cache: Path, n_nodes: int, together: bool, **options: Any) -> list[list[int]]:
    """The greedy ids of each prompt without an adapter, and with it."""
    wanted = [(name, prompt) for prompt in PROMPTS for name in ("", "one")]
    with secondaries(n_nodes - 1, cache) as nodes:
        cluster = cluster_of(nodes) if nodes else standalone()
        with Run(GivenNodes(cluster), options_of(folder, cache, **options), 180, n_texts=4) as run:
            found = []
            for adapter, prompt in wanted:
                params = SamplingParams(N_TOKENS, temperature=0)
                found.append(run.submit(prompt, encode(prompt), params, adapter=adapter))
                if not together:
                    run.read()
            run.read()
            return [list(one.token_ids) for one in found]


@pytest.mark.parametrize("n_nodes", [1, 3])
def test_lora_over_a_mixture_of_floats_has_the_tokens_of_merged_weights(
    n_nodes: int, tiny: GPT, tmp_path: Path
) -> None:
    state = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    for name, tensor in state.items():
        if (form := packed_form_of(FLOATS, name, tuple(tensor.shape))) is not None:
            state[name] = torch.from_numpy(unpack(pack(form, tensor.numpy())))
    gpt = GPT(tiny.config).eval().requires_grad_(False)
    gpt.load_state_dict(state)
    merged = write_adapter(tmp_path / "one", gpt, 5)
    folder = write_checkpoint(tmp_path / "tiny", gpt=tiny, with_end=False)
    expected = [greedy(model, encode(prompt), N_TOKENS) for prompt in PROMPTS for model in (gpt, merged)]
    assert expected[0] != expected[1] and expected[2] != expected[3]
    adapter = (f"one={tmp_path / 'one'}",)
    found = texts(folder, tmp_path, n_nodes, True, quantize=FLOATS, quantize_head=FLOATS, adapter=adapter)
    assert found == expected


def test_lora_over_block_types_does_not_depend_on_nodes_and_company(tiny: GPT, file: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", tiny, 5)
    options: dict[str, Any] = {"quantize": "own", "adapter": (f"one={tmp_path / 'one'}",)}
    alone = texts(file, tmp_path / "alone", 1, False, **options)
    assert alone[0] != alone[1] and alone[2] != alone[3], "the adapter changes nothing"
    for n_nodes, together in ((1, True), (3, True)):
        assert texts(file, tmp_path / str(n_nodes), n_nodes, together, **options) == alone


@pytest.mark.parametrize("method", METHODS)
def test_gradients_over_block_types_are_those_of_the_file_s_numbers(
    method: str, tiny: GPT, file: Path, tmp_path: Path
) -> None:
    source = GgufSource(file.parent.parent / "m.gguf")
    assert source.own_formats is not None
    packed = PackedSource(source, Packing(source.own_formats, source.own_formats))
    numbers = {name: array for part in packed.part_names() for name, array in plain(packed.weights(part)).items()}
    gpt = GPT(tiny.config).eval().requires_grad_(False)
    gpt.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in numbers.items()})
    x = torch.randn(2, 9, gpt.config.n_embd, generator=torch.Generator().manual_seed(5))
    with secondaries(1, tmp_path) as nodes:
        options = options_of(file, tmp_path, quantize="own")
        with Run(GivenNodes(cluster_of(nodes)), options, 20, n_texts=1) as run:
            weights = run.model.weights
            assert run.model.format == source.own_formats
            tuned = new_tensors(TuningKind(method, 3, 7, EVERY, LENGTH), weights.config, 1, weights.source_of)
            draw(tuned.named.values(), 6)
            found = RingBlocks(run)(behind_prompt(tuned, x), tuned.of_blocks())
            got = torch.autograd.grad(found.square().mean(), list(tuned.named.values()))
    gpt, tuned = exact(gpt, tuned)
    expected = reference(gpt, behind_prompt(tuned, x.double()), tuned)
    alike(found, expected, 1e-5)
    wanted = torch.autograd.grad(expected.square().mean(), list(tuned.named.values()))
    for one, other in zip(got, wanted, strict=True):
        alike(one, other, 3e-5)
