"""What weights take in each format."""

from __future__ import annotations

import pytest

from mdi.errors import UsageError
from mdi.kernels.layout import matrix_bytes
from mdi.kernels.weight_formats import FORMATS, LAYOUTS, PACKED, check_packed, held_bytes, is_packable, weight_format
from mdi.model.tensors import EMBEDDING

LINEAR = "transformer.h.0.mlp.proj.weight"


@pytest.mark.parametrize("form", PACKED)
def test_a_packed_weight_takes_what_the_kernels_read(form: str) -> None:
    assert FORMATS[form].tensor_bytes(LINEAR, (320, 640)) == matrix_bytes(form, 320, 640)


def test_types_of_torch_take_their_numbers() -> None:
    assert [FORMATS[f].tensor_bytes(LINEAR, (100, 320)) for f in ("float32", "bfloat16", "float16")] == [
        128_000, 64_000, 64_000,
    ]  # fmt: skip


def test_what_a_format_leaves_as_it_is() -> None:
    for name, shape in (
        (LINEAR, (8,)),
        ("transformer.h.0.mlp.gate.weight", (8, 8)),
        ("transformer.h.0.norm_1.weight", (8,)),
    ):
        assert not is_packable(name, shape)
        assert FORMATS["int4"].tensor_bytes(name, shape) == 4 * (64 if len(shape) == 2 else 8)


def test_an_embedding_is_never_in_four_bits() -> None:
    assert FORMATS["int4"].tensor_bytes(EMBEDDING, (64, 64)) == FORMATS["int8"].tensor_bytes(EMBEDDING, (64, 64))
    assert FORMATS["mxfp4"].tensor_bytes(EMBEDDING, (64, 64)) == FORMATS["int8"].tensor_bytes(EMBEDDING, (64, 64))
    assert FORMATS["fp16"].tensor_bytes(EMBEDDING, (64, 64)) == 2 * 64 * 64


def test_mxfp4_is_for_mlps_and_experts() -> None:
    form = FORMATS["mxfp4"]
    assert form.bits == 4.25
    for name in ("transformer.h.0.attn.qkv.weight", "lm_head.weight"):
        assert form.tensor_bytes(name, (64, 128)) == FORMATS["int8"].tensor_bytes(name, (64, 128))
    for name in (LINEAR, "transformer.h.0.mlp.experts.3.fc_1.weight"):
        assert form.tensor_bytes(name, (64, 128)) == 64 * 128 * 4.25 / 8


def test_what_is_held_follows_from_what_is_stored() -> None:
    assert held_bytes([1000, 500], "float32", "float32") == 1500, "mapped as it is"
    assert held_bytes([1000, 500], "bfloat16", "float32") == 3000 + 2000, "the plain numbers of one part beside it"
    assert held_bytes([], "bfloat16", "int8") == 0
    packed = int(1500 / LAYOUTS["int8"].bits * LAYOUTS["int4"].bits + 1000 * 32 / LAYOUTS["int8"].bits)
    assert held_bytes([1000, 500], "bfloat16", "int4", "int8") == packed
    assert held_bytes([1000], "bfloat16", "int8", "int8") == 1000


def test_unknown_formats() -> None:
    check_packed(None)
    for call in (check_packed, weight_format):
        with pytest.raises(UsageError) as e:
            call("int3")
        assert "int3" in str(e.value)
