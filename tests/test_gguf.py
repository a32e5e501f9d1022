"""GGUF files as sources: what was written comes back, tensor by tensor and token by token."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from litgpt.config import Config
from litgpt.model import GPT

from families import greedy, prompt
from gguf_files import as_stored, gguf_families, rope_factors, write_gguf, write_shard
from gguf_reference.write_ids import write_nano
from loopback import CPU
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.gguf import GgufTensor, read_gguf, read_tensor
from mdi.checkpoint.ggufsource import GgufSource
from mdi.checkpoint.packing import Packing, plain
from mdi.errors import CheckpointError
from mdi.families.llama import llama3_scaling
from mdi.kernels.layout import Matrix, bf16_from_float32, unpack
from mdi.model.plain import spec_of
from mdi.stages.torch_stage import StarterStage
from tiny_models import State, tiny_state

OF_LLAMA_CPP = json.loads((Path(__file__).parent / "gguf_reference" / "llama_cpp_ids.json").read_text())

# What the format has no field for is as in the real models.
_AS_REAL = {
    "Gemma-2-9b": {"attention_scores_scalar": 16},
    "Gemma-3-1b-it": {
        "attention_scores_scalar": 16,
        "sliding_window_indices": [1, 1, 1, 1, 1, 0, 1],
        "rope_indices": [1, 1, 1, 1, 1, 0, 1],
    },
}


def _tied(config: Config, state: State) -> State:
    if config.name.startswith("Gemma"):
        state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    return state


def _model(source: GgufSource) -> GPT:
    gpt = GPT(Config(**source.config.plain())).eval().requires_grad_(False)
    gpt.load_state_dict({name: source.tensor(name).float() for name in source.specs})
    return gpt


@pytest.mark.parametrize("matrices", ["F32", "F16"])
@pytest.mark.parametrize("family", gguf_families())
def test_greedy_tokens_are_those_of_the_checkpoint_it_was_written_from(
    tmp_path: Path, family: str, matrices: str
) -> None:
    config, state = tiny_state(family, **_AS_REAL.get(family, {}))
    state = as_stored(_tied(config, state), matrices)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", family, config, state, matrices))
    for name, tensor in state.items():
        torch.testing.assert_close(source.tensor(name).float(), tensor, rtol=0, atol=3e-7, msg=name)
    written = GPT(config).eval().requires_grad_(False)
    written.load_state_dict(state)
    for seed in range(2):
        ids = prompt(30, seed)
        assert greedy(_model(source), ids, 24) == greedy(written, ids, 24)


@pytest.mark.parametrize("matrices", OF_LLAMA_CPP["of"])
def test_greedy_tokens_of_a_trained_model_are_llama_cpps(tmp_path: Path, matrices: str) -> None:
    """32 after each prompt; llama.cpp's were written by gguf_reference/write_ids.py, from a file of the same bytes."""
    expected = OF_LLAMA_CPP["of"][matrices]
    path = write_nano(tmp_path / "nano.gguf", matrices)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == expected["sha256"], "write the ids anew"
    source = GgufSource(path)
    n_layer = source.config.n_layer
    stage = StarterStage(spec_of(source.config), n_layer)
    weights = {name: source.tensor(name) for name in source.specs}
    stage.load(["all"], lambda _: weights, CPU, torch.float32)
    stage.prepare(64, CPU, torch.float32)
    prompts = OF_LLAMA_CPP["prompts"]
    found = [[next_id(stage, i, ids, 0)] for i, ids in enumerate(prompts)]
    for _ in range(31):
        for i, ids in enumerate(prompts):
            found[i].append(next_id(stage, i, found[i][-1:], len(ids) + len(found[i]) - 1))
    assert found == expected["ids"]


def next_id(stage: StarterStage, seq_id: int, ids: list[int], start: int) -> int:
    x = stage(stage.embed(torch.tensor(ids)), [(seq_id, start, len(ids))])
    return int(stage.head(x[-1:]).argmax())


@pytest.mark.parametrize("matrices, code", [("Q8_0", "F16"), ("Q4_0", "F16"), ("BF16", "BF16")])
def test_quantized_weights_are_plain_when_they_are_read(tmp_path: Path, matrices: str, code: str) -> None:
    config, state = tiny_state("Llama-3.1-8B", n_embd=96, head_size=16, intermediate_size=128)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", "Llama-3.1-8B", config, state, matrices))
    bits = {"Q8_0": 8, "Q4_0": 4, "BF16": 8}[matrices]
    for name, tensor in state.items():
        assert source.specs[name].dtype == (code if tensor.dim() > 1 else "F32")
        found = source.tensor(name)
        assert found.shape == tensor.shape
        error = (found.float() - tensor).abs().max() / tensor.abs().max()
        assert error < 2.0 ** -(bits - 1), name


@pytest.mark.parametrize("n_embd, n_head", [(96, 6), (128, 8)])  # an odd number of blocks in a row, and an even one
@pytest.mark.parametrize("kind, form", [(Kind.Q4_0, "int4"), (Kind.MXFP4, "mxfp4")])
def test_half_bytes_are_not_rounded_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, form: str, n_embd: int, n_head: int
) -> None:
    config, state = tiny_state("Llama-3.1-8B", n_embd=n_embd, n_head=n_head, head_size=16, intermediate_size=128)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", "Llama-3.1-8B", config, state, kind.name))
    assert source.native == form
    packing = Packing(form, form)
    other = source.packed("lm_head.weight", Packing("int8", "int8"))["lm_head.weight"]
    assert isinstance(other, Matrix) and other.format == "int8"
    monkeypatch.setattr("mdi.checkpoint.packing.pack", lambda form, values: pytest.fail("it is rounded again"))
    names = ["transformer.h.0.mlp.fc_1.weight", "transformer.h.0.mlp.proj.weight"]
    if form == "int4":  # mxfp4 has attention and head in int8
        names += ["transformer.h.0.attn.qkv.weight", "lm_head.weight"]
    for name in names:
        weight = source.packed(name, packing)[name]
        assert isinstance(weight, Matrix) and weight.format == form
        numbers = unpack(weight)
        assert np.array_equal(
            bf16_from_float32(numbers) if form == "mxfp4" else numbers.astype(np.float16), source.array(name)
        )
    expected = gguf.quants.dequantize(gguf.quants.quantize(state[name].numpy(), kind), kind)
    assert np.array_equal(numbers, expected)
    assert np.array_equal(PackedSource(source, packing).array(name)[: weight.data.size], weight.data)
    if form == "int4":
        assert np.array_equal(plain(source.weights("head", packing))["lm_head.weight"], expected)


def test_numbers_that_are_no_minus_of_a_power_are_refused(tmp_path: Path) -> None:
    source = GgufSource(write_gguf(tmp_path / "m.gguf", "Qwen3-0.6B", *tiny_state("Qwen3-0.6B")))
    name = "transformer.ln_f.weight"
    source.tensor_pieces[name] = [replace(piece, is_neg_exp=True) for piece in source.tensor_pieces[name]]
    with pytest.raises(CheckpointError, match="output_norm.weight has numbers that are not below zero"):
        source.array(name)


def test_a_scale_of_mxfp4_that_is_no_number_is_refused(tmp_path: Path) -> None:
    config, state = tiny_state("Llama-3.1-8B", n_embd=96, head_size=16, intermediate_size=128)
    path = write_gguf(tmp_path / "m.gguf", "Llama-3.1-8B", config, state, "MXFP4")
    tensor = read_gguf(path).tensors["blk.1.ffn_down.weight"]
    with open(path, "r+b") as file:
        file.seek(tensor.offset + 17)
        file.write(b"\xff")
    source = GgufSource(path)
    name = "transformer.h.1.mlp.proj.weight"
    for call, told in (
        (lambda: source.packed(name, Packing("mxfp4", "int8")), name), (lambda: source.array(name), "blk.1.ffn_down.weight"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=re.escape(f"{path}: {told} ")):
            call()


def test_a_model_that_is_split_into_files(tmp_path: Path) -> None:
    config, state = tiny_state("Qwen3-0.6B")
    whole = GgufSource(write_gguf(tmp_path / "m.gguf", "Qwen3-0.6B", config, state))
    for i in range(2):
        write_shard(tmp_path / f"m-0000{i + 1}-of-00002.gguf", "Qwen3-0.6B", config, state, i, 2)
    source = GgufSource(tmp_path / "m-00001-of-00002.gguf")
    assert source.config_hash == whole.config_hash
    for name in whole.specs:
        assert np.array_equal(source.array(name), whole.array(name))
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError) as e:
        GgufSource(tmp_path / "m-00001-of-00002.gguf")
    assert "m-00002-of-00002" in str(e.value)


@pytest.mark.parametrize("original", [4096, 8192])
@pytest.mark.parametrize("base, head_size", [(500000, 128), (500000, 64), (500000, 8), (10000, 4)])
def test_the_settings_of_a_scaled_rope_follow_from_its_factors(base: int, head_size: int, original: int) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": original}
    config = Config(n_embd=head_size, n_head=1, head_size=head_size, rope_base=base, rope_adjustments=scaling)
    factors = rope_factors(config)
    found = llama3_scaling(factors, base)
    if found is None:
        assert (factors == 1).all()
        return
    again = {**scaling, "high_freq_factor": found["high_freq_factor"]}
    again["original_max_seq_len"] = found["original_max_position_embeddings"]
    config.rope_adjustments = again
    np.testing.assert_allclose(rope_factors(config), factors, rtol=2e-3)
    if head_size >= 64:
        assert again == scaling
        with pytest.raises(ValueError, match="not supported"):
            llama3_scaling(factors * np.linspace(1, 3, len(factors), dtype=np.float32), base)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    config, state = tiny_state("Llama-3.1-8B")
    path = tmp_path_factory.mktemp("good") / "m.gguf"
    return write_gguf(path, "Llama-3.1-8B", config, state).read_bytes()


def _u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _head(n_tensors: int, n_fields: int) -> bytes:
    return b"GGUF" + (3).to_bytes(4, "little") + _u64(n_tensors) + _u64(n_fields)


def _field(key: bytes, kind: int, value: bytes) -> bytes:
    return _u64(len(key)) + key + kind.to_bytes(4, "little") + value


HOSTILE = {
    "empty": b"",
    "another format": b"PK\x03\x04" + bytes(100),
    "a version of the future": b"GGUF" + bytes([9, 0, 0, 0]) + bytes(64),
    "big-endian": b"GGUF" + bytes([0, 0, 0, 3]) + bytes(64),
    "endless fields": _head(0, 1 << 62) + bytes(64),
    "endless tensors": _head(1 << 62, 0) + bytes(64),
    "an endless list of numbers": _head(0, 1) + _field(b"a", 9, (4).to_bytes(4, "little") + _u64(1 << 61)),
    "an endless list of strings": _head(0, 1) + _field(b"a", 9, (8).to_bytes(4, "little") + _u64(1 << 61)),
    "lists in lists": _head(0, 1) + _field(b"a", 9, (9).to_bytes(4, "little") + _u64(1) + bytes(40)),
    "an endless string": _head(0, 1) + _field(b"a", 8, _u64(1 << 63)),
    "a type that is none": _head(0, 1) + _field(b"a", 77, bytes(8)),
    "no text": _head(0, 1) + _field(b"\xff\xfe", 4, bytes(4)),
    "the same field twice": _head(0, 2) + 2 * _field(b"a", 4, bytes(4)) + bytes(32),
    "a tensor of endless size": (
        _head(1, 0) + _u64(1) + b"a" + (4).to_bytes(4, "little") + 4 * _u64(1 << 39) + bytes(4) + _u64(0) + bytes(64)
    ),
    "a tensor of no size": (
        _head(1, 0) + _u64(1) + b"a" + (1).to_bytes(4, "little") + _u64(0) + bytes(4) + _u64(0) + bytes(64)
    ),
    "nothing in it": _head(0, 0) + bytes(64),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_line(tmp_path: Path, case: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(CheckpointError) as caught:
        GgufSource(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def _tensor(name: bytes, offset: int) -> bytes:
    """Of 32 numbers in float32."""
    return _u64(len(name)) + name + (1).to_bytes(4, "little") + _u64(32) + bytes(4) + _u64(offset)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (_head(0, 2) + 2 * _field(b"a", 4, bytes(4)), "field 'a' twice"),
        (_head(2, 0) + _tensor(b"b", 0) + _tensor(b"b", 128), "tensor 'b' twice"),
        (_head(1, 0) + _tensor(b"b", 4), "takes the bytes"),
        (
            _head(1, 1) + _field(b"general.alignment", 4, (64).to_bytes(4, "little")) + _tensor(b"b", 32),
            "takes the bytes",
        ),
        (_head(2, 0) + _tensor(b"b", 0) + _tensor(b"c", 128), ""),
    ],
    ids=["a field", "a tensor", "not aligned", "not aligned as the file says", "right"],
)
def test_what_comes_twice_or_between_two_places(tmp_path: Path, content: bytes, words: str) -> None:
    """Read without the rest of a model, whose lack would be an error, too."""
    path = tmp_path / "m.gguf"
    path.write_bytes(content + bytes(512))
    if not words:
        assert list(read_gguf(path).tensors) == ["b", "c"]
        return
    with pytest.raises(CheckpointError, match=words):
        read_gguf(path)


def test_numbers_that_half_precision_does_not_have_are_refused(tmp_path: Path) -> None:
    """Of a K format, whose numbers are products of two scales."""
    path = tmp_path / "m.gguf"
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[Kind.Q4_K]
    for scale, is_refused in ((1.0, False), (60000.0, True), (float("inf"), True)):
        block = np.full(block_bytes, 0xFF, dtype=np.uint8)
        block[:4] = np.array([scale, 0.0], dtype=np.float16).view(np.uint8)  # d, dmin
        path.write_bytes(block.tobytes())
        tensor = GgufTensor(path, "Q4_K", (per_block,), 0, block_bytes)
        if is_refused:
            with pytest.raises(CheckpointError, match="some.weight"):
                read_tensor(tensor, "some.weight")
        else:
            assert np.isfinite(read_tensor(tensor, "some.weight")).all()


def test_a_damaged_file_is_one_line_wherever_it_is_damaged(tmp_path: Path, good: bytes) -> None:
    """Cut anywhere, and with any bytes of the head changed: an error of ours, or a model that can still be read."""
    path = tmp_path / "m.gguf"
    generator = random.Random(5)
    head = good.index(b"output_norm") + 64
    for i in range(300):
        damaged = bytearray(good)
        if i % 3 == 0:
            del damaged[generator.randrange(len(good)) :]
        else:
            for _ in range(generator.randrange(1, 4)):
                damaged[generator.randrange(head)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            source = GgufSource(path)
        except CheckpointError as e:
            assert "\n" not in str(e)
        else:
            assert source.array("lm_head.weight").shape == (97, 48)


@pytest.mark.parametrize(
    "field, value",
    [
        ("block_count", 1_000_000_000),
        ("block_count", 4),
        ("block_count", [float("nan")] * 50),
        ("attention.head_count", 7),
        ("attention.head_count", 0),
        ("attention.head_count_kv", 5),
        ("embedding_length", 64),
        ("feed_forward_length", 1 << 31),
        ("context_length", (1 << 32) - 1),
        ("rope.scaling.type", "yarn"),  # without its factor
        ("expert_count", 4),
    ],
)
def test_fields_that_contradict_the_tensors_are_one_line(tmp_path: Path, field: str, value: object) -> None:
    config, state = tiny_state("Llama-3.1-8B")
    path = write_gguf(tmp_path / "m.gguf", "Llama-3.1-8B", config, state, changes={f"llama.{field}": value})
    with pytest.raises(CheckpointError) as caught:
        GgufSource(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["general.architecture", "general.alignment", "general.name"])
def test_fields_that_are_lists_are_one_line_or_nothing(tmp_path: Path, field: str) -> None:
    config, state = tiny_state("Llama-3.1-8B")
    for value in (["a"], [1] * 100):
        path = write_gguf(tmp_path / "m.gguf", "Llama-3.1-8B", config, state, changes={field: value})
        if field == "general.name":
            assert GgufSource(path).model == "m"
            continue
        with pytest.raises(CheckpointError) as caught:
            GgufSource(path)
        assert len(str(caught.value).splitlines()) == 1


def test_another_architecture_is_named(tmp_path: Path) -> None:
    config, state = tiny_state("Llama-3.1-8B")
    path = write_gguf(tmp_path / "m.gguf", "Llama-3.1-8B", config, state, changes={"general.architecture": "mamba"})
    with pytest.raises(CheckpointError) as e:
        GgufSource(path)
    assert "'mamba'" in str(e.value)


def test_norms_of_gemma_that_are_rounded_are_refused(tmp_path: Path) -> None:
    """The one that they have in the file is larger than most weights, whose lowest bits are then lost."""
    config, state = tiny_state("Gemma-2b")
    types = {"blk.1.ffn_norm.weight": "F16"}
    path = write_gguf(tmp_path / "m.gguf", "Gemma-2b", config, _tied(config, state), types=types)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_norm\.weight is not in F32"):
        GgufSource(path)


def test_queries_and_keys_of_other_types_than_values(tmp_path: Path) -> None:
    """They become one matrix, of the type that holds all of them; int4 is none of theirs alone."""
    config, state = tiny_state("Llama-3.1-8B", n_embd=96, head_size=16, intermediate_size=128)
    types = {"blk.1.attn_v.weight": "F32", "blk.0.attn_v.weight": "Q8_0"}
    source = GgufSource(write_gguf(tmp_path / "m.gguf", "Llama-3.1-8B", config, state, "Q4_0", types=types))
    name = "transformer.h.1.attn.qkv.weight"
    assert [source.specs[f"transformer.h.{i}.attn.qkv.weight"].dtype for i in range(2)] == ["F16", "F32"]
    n_before = (config.n_head + config.n_query_groups) * config.head_size
    assert np.array_equal(source.array(name)[n_before:], state[name].numpy()[n_before:])
    assert source.carried_over("transformer.h.0.attn.qkv.weight", "int4") is None
    assert source.carried_over("transformer.h.2.attn.qkv.weight", "int4") is not None


def test_scaling_of_positions_by_yarn_is_read_from_the_file(tmp_path: Path) -> None:
    config, state = tiny_state("Qwen2.5-0.5B")
    changes = {
        "qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 40, "qwen2.rope.scaling.yarn_beta_fast": 16.0,
    }  # fmt: skip
    path = write_gguf(tmp_path / "m.gguf", "Qwen2.5-0.5B", config, state, changes=changes)
    assert GgufSource(path).config.rope_adjustments == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "beta_fast": 16.0,
        "attention_factor": pytest.approx(0.1 * math.log(4) + 1),
    }  # fmt: skip


def test_factors_of_longrope_are_read_from_their_tensors(tmp_path: Path) -> None:
    config, state = tiny_state("Phi-3-mini-4k-instruct")
    n = config.rope_n_elem // 2
    factors = {"short": np.linspace(1, 2, n, dtype=np.float32), "long": np.linspace(3, 9, n, dtype=np.float32)}
    path = write_gguf(
        tmp_path / "m.gguf", "Phi-3-mini-4k-instruct", config, state,
        changes={"phi3.rope.scaling.original_context_length": 16, "phi3.rope.scaling.attn_factor": 1.25},
        more={f"rope_factors_{which}.weight": of_which for which, of_which in factors.items()},
    )  # fmt: skip
    found = GgufSource(path).config.plain()["rope_adjustments"]
    assert found == {
        "rope_type": "longrope", "factor": config.block_size / 16, "original_max_position_embeddings": 16,
        "attention_factor": 1.25, **{f"{which}_factor": of_which.tolist() for which, of_which in factors.items()},
    }  # fmt: skip
