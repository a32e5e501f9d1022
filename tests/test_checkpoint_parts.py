"""Parts, their canonical bytes, manifests and splits."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from families import FAMILIES, config_of
from mdi.block_ranges import default_split, head_cost_blocks, parse_layers, ranges, split_at, split_layers
from mdi.checkpoint.manifest import Manifest, config_hash
from mdi.checkpoint.parts import (
    PIECE_BYTES,
    PartInfo,
    part_of,
    serialize,
    sha256_of,
    spec_bytes,
    stage_parts,
)
from mdi.checkpoint.safetensors_layout import TYPES, TensorSpec, read_header
from mdi.checkpoint.shapes import model_shapes
from mdi.checkpoint.torch_tensors import as_array, as_tensor, tensor_spec
from mdi.errors import CheckpointError, SplitError
from mdi.files import replacing
from mdi.model.plain import ModelConfig, spec_of


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        ("transformer.wte.weight", "embedding"),
        ("transformer.h.0.norm_1.weight", "block.0"),
        ("transformer.h.12.attn.qkv.bias", "block.12"),
        ("transformer.ln_f.weight", "head"),
        ("lm_head.weight", "head"),
    ],
)
def test_part_of(tensor: str, part: str) -> None:
    assert part_of(tensor) == part


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "transformer.h.x.y", "transformer.h.01.y", ""])
def test_part_of_a_strange_name(name: str) -> None:
    with pytest.raises(CheckpointError) as e:
        part_of(name)
    assert str(e.value).startswith(name)


def test_stage_parts() -> None:
    assert stage_parts(0, 2, starter=True) == ["embedding", "block.0", "block.1", "head"]
    assert stage_parts(0, 0, starter=True) == ["embedding", "head"]
    assert stage_parts(3, 5, starter=False) == ["block.3", "block.4"]


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(3)},
        {"x": torch.randn(5, 7).bfloat16(), "y": torch.randn(3).half()},
        {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "last": torch.tensor([True, False, True])},
        {"narrow": torch.arange(3, dtype=torch.uint8), "wide": torch.arange(5, dtype=torch.int64)},
        {"strided": torch.arange(12.0).reshape(3, 4).t()},
    ],
)
def test_canonical_bytes_are_a_safetensors_file(tensors: dict[str, torch.Tensor]) -> None:
    specs, array = _given(tensors)
    data = b"".join(serialize(specs, array))
    back = load(data)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
    assert len(data) == spec_bytes(specs)
    assert hashlib.sha256(data).hexdigest() == sha256_of(specs, array)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert data == save(contiguous)  # the library happens to write the same bytes


def _given(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, TensorSpec], Callable[[str], np.ndarray]]:
    return {name: tensor_spec(tensor) for name, tensor in tensors.items()}, lambda name: as_array(tensors[name])


def _sha(tensors: dict[str, torch.Tensor]) -> str:
    return sha256_of(*_given(tensors))


def test_bytes_do_not_depend_on_the_order_of_the_mapping() -> None:
    a, b = torch.ones(3), torch.zeros(2)
    assert _sha({"a": a, "b": b}) == _sha({"b": b, "a": a})
    assert _sha({"a": a, "b": b}) != _sha({"a": a, "c": b})
    assert _sha({"a": a.reshape(3, 1)}) != _sha({"a": a})
    assert _sha({"a": torch.zeros(4).half()}) != _sha({"a": torch.zeros(4).bfloat16()})


def test_the_hash_never_changes() -> None:
    """Caches of other machines hold these hashes."""
    tensors = {"transformer.h.0.x": torch.arange(4, dtype=torch.float32), "transformer.h.0.b": torch.ones(1).bfloat16()}
    assert _sha(tensors) == "94aee9a01a9a11be8ffe52f9b985ad1f2300e262a18b81be33b4ab38d136722b"


def test_pieces_are_small() -> None:
    data = np.zeros(3 * PIECE_BYTES + 5, dtype=np.uint8)
    sizes = [len(piece) for piece in serialize({"a": TensorSpec("U8", data.shape)}, lambda _: data)]
    assert max(sizes) == PIECE_BYTES
    assert len(sizes) == 5


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.randn(4, 5).bfloat16().t(),
        torch.randn(3).half(),
        torch.randn(8).to(torch.float8_e4m3fn),
        torch.randn(8).to(torch.float8_e5m2).reshape(2, 4),
        torch.tensor(2.5).bfloat16(),
        torch.tensor([True, False]),
        torch.arange(3),
        torch.empty(0, 4, dtype=torch.bfloat16),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}",
)
def test_tensors_become_arrays_and_back(tensor: torch.Tensor) -> None:
    array, spec = as_array(tensor), tensor_spec(tensor)
    assert array.dtype == TYPES[spec.dtype].numpy and array.shape == spec.shape
    back = as_tensor(array, spec)
    assert back.dtype == tensor.dtype and torch.equal(back.float(), tensor.float())
    array.flags.writeable = False
    copied = as_tensor(array, spec)
    assert torch.equal(copied.float(), tensor.float()) and (not array.size or copied.data_ptr() != array.ctypes.data)


def test_a_type_that_no_file_holds() -> None:
    with pytest.raises(CheckpointError) as e:
        tensor_spec(torch.zeros(2, dtype=torch.complex64))
    assert "complex64" in str(e.value)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_file_that_fails_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(error), replacing(path) as file:
        file.write(b"half of the ne")
        raise error
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    with pytest.raises(CheckpointError) as e, replacing(tmp_path / "no" / "x"):
        pass
    assert str(tmp_path / "no" / "x") in str(e.value)


@given(st.binary(max_size=200))
def test_any_bytes_as_a_header(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        read_header(path)


@pytest.mark.parametrize(
    "entries",
    [
        [],
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
        {"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
        {"a": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"__metadata__": {"a": 1}},
    ],
)
def test_damaged_headers(tmp_path: Path, entries: Any) -> None:
    text = json.dumps(entries).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    with pytest.raises(CheckpointError) as e:
        read_header(path)
    assert "a.safetensors" in str(e.value)


# -- manifests


def _manifest(**changes: Any) -> Manifest:
    config = ModelConfig.from_litgpt(config_of("Llama-3.1-8B"))
    parts = tuple(PartInfo(name, "ab" * 32, 100) for name in stage_parts(2, 5, starter=False))
    manifest = Manifest("tiny", config, config_hash(config), "float32", 3, "secondary1", (2, 5), 5, parts)
    return Manifest(**{**manifest.__dict__, **changes})


def test_a_manifest_there_and_back() -> None:
    assert Manifest.from_json(_manifest().to_json()) == _manifest()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format_version", 1),
        ("model", None),
        ("config", []),
        ("config_hash", "00"),
        ("n_nodes", 7),
        ("n_nodes", True),
        ("n_nodes", 0),
        ("node", "secondary2"),
        ("node", "secondary01"),
        ("node", "starter"),
        ("node", "../x"),
        ("blocks", [3, 5]),
        ("blocks", [5, 2]),
        ("blocks", [2, 6]),
        ("blocks", [2, 2]),
        ("blocks", [2]),
        ("blocks", [2, 5.0]),
        ("n_layer", 6),
        ("parts", []),
        ("parts", [3]),
        ("parts", [{"name": "block.2", "sha256": "xy", "n_bytes": 3}]),
        ("parts", [{"name": "block.2", "sha256": "ab" * 32, "n_bytes": 0}]),
        ("parts", [{"name": "block.2"}]),
    ],
)
def test_a_wrong_field_of_a_manifest_is_named(field: str, value: Any) -> None:
    data = json.loads(_manifest().to_json())
    with pytest.raises(CheckpointError) as caught:
        Manifest.from_json(json.dumps({**data, field: value}))
    assert "manifest" in str(caught.value)
    assert field in str(caught.value) or field in ("node", "parts")
    del data[field]
    with pytest.raises(CheckpointError) as e:
        Manifest.from_json(json.dumps(data))
    assert field in str(e.value)


@pytest.mark.parametrize("text", ["", "{", "3", "null", "[" * 100_000])
def test_no_manifest(text: str) -> None:
    with pytest.raises(CheckpointError) as e:
        Manifest.from_json(text)
    assert "manifest" in str(e.value)


def test_config_hash() -> None:
    config = ModelConfig.from_litgpt(config_of("Llama-3.1-8B"))
    same = replace(config, name="other", hf_config={"org": "x"}, rope_base=float(config.rope_base))
    assert config_hash(same) == config_hash(config)
    assert config_hash(ModelConfig.of(json.loads(json.dumps(config.plain())))) == config_hash(config)
    for change in (
        {"n_layer": 6},
        {"norm_eps": 1e-3},
        {"rope_adjustments": None},
        {"name": "a Gemma"},
        {"norm_unit_offset": True},
    ):
        assert config_hash(replace(config, **change)) != config_hash(config)


# -- splits


@given(st.data(), st.integers(1, 200), st.floats(0, 50))
def test_splits_are_even(data: st.DataObject, n_layer: int, cost: float) -> None:
    n_nodes = data.draw(st.integers(1, n_layer + 1))
    counts = split_layers(n_layer, n_nodes, cost)
    assert len(counts) == n_nodes
    assert sum(counts) == n_layer
    assert counts[0] >= 0
    assert all(count >= 1 for count in counts[1:])
    assert max(counts[1:], default=0) - min(counts[1:], default=0) <= 1
    cut = ranges(counts)
    assert cut[0][0] == 0 and cut[-1][1] == n_layer
    assert all(a[1] == b[0] for a, b in zip(cut, cut[1:], strict=False))
    slowest = max(counts[0] + cost, *counts[1:], 0)
    for own in range(n_layer - n_nodes + 2 if n_nodes > 1 else 0):  # no other number for the starter is better
        others = -(-(n_layer - own) // (n_nodes - 1))
        assert max(own + cost, others) >= slowest


@pytest.mark.parametrize(
    ("n_layer", "n_nodes", "cost", "expected"),
    [
        (5, 1, 3.0, (5,)),
        (12, 3, 0.0, (4, 4, 4)),
        (22, 3, 1.5, (6, 8, 8)),
        (5, 6, 0.0, (0, 1, 1, 1, 1, 1)),
        (10, 2, 100.0, (0, 10)),
    ],
)
def test_splits(n_layer: int, n_nodes: int, cost: float, expected: tuple[int, ...]) -> None:
    assert split_layers(n_layer, n_nodes, cost) == expected


@pytest.mark.parametrize("n_nodes", [0, -1, 7])
def test_what_cannot_be_split(n_nodes: int) -> None:
    with pytest.raises(SplitError) as e:
        split_layers(5, n_nodes)
    assert "5 blocks" in str(e.value) and "1 to 6" in str(e.value) and str(n_nodes) in str(e.value)
    with pytest.raises(SplitError) as e:
        parse_layers("1,1,1", 5, n_nodes)
    assert "5 blocks" in str(e.value) and "1 to 6" in str(e.value) and str(n_nodes) in str(e.value)


def test_layers_by_hand() -> None:
    assert parse_layers("4,9,9", 22, 3) == (4, 9, 9)
    assert parse_layers("0, 5", 5, 2) == (0, 5)
    for text, n_nodes, reason in [
        ("4,9", 3, "2 nodes, but there are 3"),
        ("4,9,8", 3, "21 blocks in all, but the model has 22"),
        ("22,0", 2, "secondary0 gets no block"),
        ("4,-1,19", 3, "cannot hold -1"),
        ("4;9", 2, "such as 4,9,9"),
        ("", 1, "such as 4,9,9"),
    ]:
        with pytest.raises(SplitError) as e:
            parse_layers(text, 22, n_nodes)
        assert reason in str(e.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cost_of_the_head_is_that_of_its_weights(family: str) -> None:
    config = ModelConfig.from_litgpt(config_of(family))
    if config.mlp_class_name == "LLaMAMoE":  # make every expert one that a token meets
        config = replace(config, n_expert_per_token=config.n_expert, n_topk_groups=config.n_expert_groups)
    shapes = model_shapes(config, family)
    last = config.n_layer - 1
    block = sum(
        a * b
        for name, (a, b) in _matrices(shapes)
        if name.startswith(f"transformer.h.{last}.") and "gate.w" not in name
    )
    head = config.n_embd * config.padded_vocab_size
    assert head_cost_blocks(spec_of(config)) == pytest.approx(head / block)
    assert sum(default_split(spec_of(config), 3)) == config.n_layer


def _matrices(shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, shape) for name, shape in shapes.items() if len(shape) == 2]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_an_even_split_keeps_together_what_belongs_together(data: st.DataObject) -> None:
    n_layer = data.draw(st.integers(1, 9))
    cuts = sorted({0, n_layer, *data.draw(st.sets(st.integers(0, n_layer), max_size=n_layer))})
    n_nodes = data.draw(st.integers(1, len(cuts)))
    cost = data.draw(st.sampled_from([0.0, 0.5, 3.0]))

    def loads(counts: tuple[int, ...]) -> tuple[float, float]:
        loads = [counts[0] + cost, *counts[1:]]
        return max(loads), sum(load * load for load in loads)

    counts = split_layers(n_layer, n_nodes, cost, cuts)
    inner = [c for c in cuts if c < n_layer]
    splits = [
        tuple(b - a for a, b in itertools.pairwise([0, *chosen, n_layer]))
        for chosen in itertools.combinations(inner, n_nodes - 1)
    ]
    assert counts in splits and loads(counts) == pytest.approx(min(map(loads, splits)))
    with pytest.raises(SplitError, match=rf"{len(cuts)} nodes .* not for {len(cuts) + 1}$"):
        split_layers(n_layer, len(cuts) + 1, cost, cuts)


def test_a_cut_by_hand_is_refused_where_blocks_belong_together() -> None:
    assert parse_layers("2,4", 6, 2, [0, 2, 5, 6]) == (2, 4)
    with pytest.raises(SplitError, match=r"before block 3.*before 2 or 5"):
        parse_layers("3,3", 6, 2, [0, 2, 5, 6])


def test_stages_of_several_nodes_are_cut_where_the_model_may_be() -> None:
    assert split_at([0, 2, 5, 6], [2, 1]) == (5, 1)
    assert split_at([0, 3, 6], [1, 1], of_first=9.0) == (0, 6)
