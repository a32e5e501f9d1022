"""Formats by matrix and by rows: their texts, and matrices in several formats."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mdi.checkpoint.parts import part_of
from mdi.errors import CheckpointError, KernelError, UsageError
from mdi.kernels import library
from mdi.kernels.blocks import Context, Linear
from mdi.kernels.format_maps import (
    file_word,
    format_map,
    joined_pieces,
    map_of,
    matrix_pieces,
    rows_form,
    shown,
)
from mdi.kernels.layout import Matrix, PackedRows, cut, matrix_bytes, pack, unpack, unpacked_rows
from mdi.kernels.weight_formats import check_packed, packed_form_of, weight_format
from mdi.model.tensors import EMBEDDING, HEAD

WORDS = ("int8", "int4", "bf16", "float32")
LAYERS = ("attn.qkv", "attn.proj", "mlp.gate", *(f"mlp.experts.{e}.{fc}" for e in range(3) for fc in ("fc_1", "proj")))
needs_kernels = pytest.mark.skipif(library.load() is None, reason="no kernels")


def drawn_formats(seed: int) -> dict[str, str]:
    """A format for each weight of a model; most layers, but not all, are alike in all blocks."""
    draw = random.Random(seed)
    usual = {layer: draw.choice([*WORDS, "int4*32+int8"]) for layer in LAYERS}
    found = {
        f"transformer.h.{block}.{layer}.weight": draw.choice(WORDS) if draw.random() < 0.3 else usual[layer]
        for block in range(draw.randint(1, 9))
        for layer in LAYERS
    }
    return {EMBEDDING: draw.choice(WORDS), **found, HEAD: draw.choice(WORDS)}


@pytest.mark.parametrize("seed", range(40))
def test_a_text_says_the_format_of_each_weight(seed: int) -> None:
    formats = drawn_formats(seed)
    found = format_map(map_of(formats))
    assert {name: found.at(name) for name in formats} == formats
    assert str(found) == map_of(dict(random.Random(seed).sample(sorted(formats.items()), len(formats))))


@pytest.mark.parametrize("seed", range(20))
def test_the_map_of_a_part_says_the_same_of_its_weights(seed: int) -> None:
    formats = drawn_formats(seed)
    whole = format_map(map_of(formats))
    for name, form in formats.items():
        part = part_of(name)
        text = whole.of_part(part)
        assert format_map(text).at(name) == form
        assert format_map(text).of_part(part) == text, "a file says of its part what the model says of it"
        assert "@" not in text


def test_alike_blocks_have_equal_texts() -> None:
    text = map_of({f"transformer.h.{i}.{layer}.weight": "int4" for i in range(3) for layer in ("mlp.fc", "mlp.proj")})
    assert text == "int4"
    more = format_map("int4;mlp.proj=int8;mlp.proj@1=int4")
    assert (more.of_part("block.0"), more.of_part("block.1")) == ("int4;mlp.proj=int8", "int4")


def test_experts_are_named_once() -> None:
    names = [f"transformer.h.{i}.mlp.experts.{e}.proj.weight" for i in range(4) for e in range(128)]
    assert map_of(dict.fromkeys(names, "int8")) == "int8"
    one = {**dict.fromkeys(names, "int8"), "transformer.h.2.mlp.experts.7.proj.weight": "int4"}
    assert map_of(one) == "int8;mlp.experts.7.proj@2=int4"


@pytest.mark.parametrize(
    "text",
    [
        "", "int8;", "int8;attn.qkv", "int8;attn.qkv=", "int8;=int4", "int8;attn.qkv@=int4", "int8;attn.qkv@1-=int4",
        "int8;attn.qkv=int4*17+int8", "int8;attn.qkv=int4*0+int8", "int8;attn.qkv=int4+int8", "int8*16+int4;a=int4",
        "int8;mlp.proj=int4;attn.proj=int4", "int8;mlp.proj@3,1=int4", "int8 ;mlp.proj=int4", "int8;mlp.proj@0-99999=int4",
        "int8;" + ";".join(f"a.b{i:04}=int4" for i in range(3000)), "int8;mlp.proj=Q4", "../int8", "int8;mlp.proj=nf4",
        ";".join(["int8", *(f"a{i:03}@0-9999=int4" for i in range(200))]),
    ],
)  # fmt: skip
def test_what_is_no_map_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError) as e:
        check_packed(text)
    assert "\n" not in str(e.value) and len(str(e.value)) < 600


def test_words_for_people_and_files() -> None:
    assert shown("int8") == shown("int8;transformer.wte=int8") == "int8"
    assert shown("int8;mlp.proj=int4*16+bf16") == "a mixture of bf16, int4, int8"
    assert file_word("int8") == "int8"
    assert len({file_word("int8;mlp.proj=int4"), file_word("int8;mlp.proj=bf16")}) == 2
    assert all(c.isalnum() or c == "-" for c in file_word("int8;mlp.proj=int4"))


def test_an_embedding_is_packed_where_a_map_names_it() -> None:
    assert packed_form_of("int8", EMBEDDING, (100, 64)) is None
    assert packed_form_of("int8;transformer.wte=bf16", EMBEDDING, (100, 64)) == "bf16"


def test_bytes_of_a_mixture() -> None:
    form = weight_format("int4;attn.qkv=int4*32+int8;transformer.wte=bf16")
    name = "transformer.h.0.attn.qkv.weight"
    assert form.tensor_bytes(name, (80, 128)) == matrix_bytes("int4", 32, 128) + matrix_bytes("int8", 48, 128)
    assert form.tensor_bytes("transformer.h.0.mlp.proj.weight", (80, 128)) == matrix_bytes("int4", 80, 128)
    assert form.tensor_bytes(EMBEDDING, (80, 128)) == matrix_bytes("bf16", 80, 128)
    assert form.tensor_bytes("transformer.ln_f.weight", (128,)) == 4 * 128


def numbers(n_out: int, n_in: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n_out, n_in), dtype=np.float32)


FORMS = ("int4*32+int8*16+bf16", "float32*16+fp16*16+int4*16+mxfp4", "int8*64+int8")


@pytest.mark.parametrize("form", FORMS)
def test_pieces_are_packed_as_matrices_of_their_own(form: str) -> None:
    weight = numbers(100, 130)
    whole = pack(form, weight)
    alone = [pack(piece.word, weight[piece.first : piece.first + piece.n]) for piece in matrix_pieces(form, 100)]
    assert whole.data.size == matrix_bytes(form, 100, 130)
    assert np.array_equal(whole.data, np.concatenate([piece.data for piece in alone]))
    assert np.array_equal(unpack(whole), np.concatenate([unpack(piece) for piece in alone]))
    assert np.array_equal(unpacked_rows(whole)[13:70], unpack(whole)[13:70])
    ids = np.random.default_rng(1).integers(0, 100, 200)
    assert np.array_equal(PackedRows(whole)[ids], unpack(whole)[ids])


def test_rows_that_are_too_few_for_a_format() -> None:
    with pytest.raises(UsageError, match="32 rows"):
        pack("int4*32+int8", numbers(32, 64))
    with pytest.raises(CheckpointError, match="^w "):
        pack("int4*32+int8", np.full((48, 64), np.inf, dtype=np.float32), "w")
    with pytest.raises(KernelError, match="has 16$"):
        from mdi.kernels.blocks import check_matrix

        check_matrix(Matrix("int4*32+int8", 16, 64, pack("int4", numbers(16, 64)).data))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [None, (0, 64), (40, 130), (70, 100), (64, 64)])
def test_cuts_of_a_mixture(form: str, columns: tuple[int, int] | None) -> None:
    whole = pack(form, numbers(100, 130))
    for rows in ([(0, 100)], [(16, 48), (64, 100)], [(0, 32)], [(32, 48), (48, 64), (96, 100)], []):
        found = cut(whole, rows, columns)
        first, last = columns or (0, 130)
        expected = np.concatenate([unpack(whole)[a:b, first:last] for a, b in rows] or [np.empty((0, last - first))])
        assert found.format == rows_form(form, 100, rows)
        assert found.n_in - found.skip == last - first
        if expected.size:
            assert np.array_equal(unpack(found)[:, found.skip :], expected)
            assert not unpack(found)[:, : found.skip].any()


def test_a_cut_within_a_panel_of_another_format_is_refused() -> None:
    assert rows_form("int4*32+int8", 80, [(0, 8)]) == "int4"
    with pytest.raises(UsageError, match="multiple of 16"):
        rows_form("int4*32+int8", 80, [(0, 8), (32, 48)])
    assert joined_pieces([(8, "int4"), (16, "int8")]) is None
    assert joined_pieces([(8, "int4"), (16, "int4"), (5, "int4")]) == "int4"


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_products_are_those_of_the_pieces(form: str, n_threads: int) -> None:
    whole, bias = pack(form, numbers(112, 130)), numbers(1, 112, 5)[0]
    context = Context(n_threads)
    linear = Linear(context, whole, bias)
    for n in (1, 2, 7, 16, 70):
        x = numbers(n, 130, n)
        y, first = linear(x), 0
        for piece in whole.pieces:
            own = np.ascontiguousarray(bias[first : first + piece.n_out])
            assert np.array_equal(y[:, first : first + piece.n_out], Linear(context, piece, own)(x))
            first += piece.n_out
    context.close()
