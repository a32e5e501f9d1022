"""Where tensors of ours are in files of a family: each way in which a module may hold one, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mdi.families.names import Held, Names, Piece, gated_qkv
from mdi.model.plain import ModelConfig

# A head has 5 rows: 20 of queries, 10 of keys and 10 of values.
CONFIG = ModelConfig(n_layer=3, n_embd=6, n_head=4, n_query_groups=2, head_size=5, n_expert=7)
LATENT = replace(
    CONFIG, n_query_groups=4,
    latent_attention={
        "q_lora_rank": 4, "kv_lora_rank": 3, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 5,
    },
)  # fmt: skip
QKV = ("q", "k", "v")
AT = "model.layers.1."
OF_THREE: dict[str, tuple[int, int]] = {"q": (20, 4), "k": (10, 2), "v": (10, 0)}  # rows; heads, if they are paired


def one(name: str, shape: tuple[int, ...], *others: Any, **more: Any) -> list[tuple[Piece, ...]]:
    return [(Piece(AT + name, shape, *others, **more),)]


# What holds it, our name and shape within block 1, and of what it is made.
PLACES: dict[str, tuple[Any, str, tuple[int, ...], list[tuple[Piece, ...]]]] = {
    "as it is": ("o", "x.weight", (4, 6), one("o.weight", (4, 6))),
    "whole": ("sinks", "x", (4,), one("sinks", (4,))),
    "three": (QKV, "x.weight", (40, 6), [tuple(Piece(f"{AT}{x}.weight", (n, 6)) for x, (n, _) in OF_THREE.items())]),
    "pairs": (
        Held(QKV, is_paired=True), "x.bias", (40,),
        [tuple(Piece(f"{AT}{x}.bias", (n,), n_paired=heads) for x, (n, heads) in OF_THREE.items())],
    ),
    "first half": (Held(("o",), 0), "x.weight", (4, 6), one("o.weight", (8, 6), (0, 4, 1))),
    "second half": (Held(("o",), 1), "x.weight", (4, 6), one("o.weight", (8, 6), (4, 8, 1))),
    "first in turn": (Held(("o",), 0, True), "x.bias", (4,), one("o.bias", (8,), (0, 8, 2))),
    "second in turn": (Held(("o",), 1, True), "x.bias", (4,), one("o.bias", (8,), (1, 8, 2))),
    "behind others": (Held(("o",), n_before=3), "x.weight", (5, 6), one("o.weight", (8, 6), (3, 8, 1))),
    "transposed": (
        Held(("o",), is_transposed=True), "x.weight", (4, 6), one("o.weight", (6, 4), is_transposed=True),
    ),
    "bias of a transposed one": (Held(("o",), is_transposed=True), "x.bias", (4,), one("o.bias", (4,))),
    "by groups": (Held(("o",), is_interleaved=True), "x.bias", (4,), one("o.bias", (4,), is_interleaved=True)),
    "changed": (
        Held(("o",), plus=1.0, is_neg_exp=True), "x.weight", (4,), one("o.weight", (4,), plus=1.0, is_neg_exp=True),
    ),
    "expert": ("e.{i}.w", "mlp.experts.12.fc.weight", (4, 6), one("e.12.w.weight", (4, 6))),
    "stacked": (
        Held(("e",), 1, True, is_stacked=True, is_transposed=True), "mlp.experts.2.fc.weight", (4, 6),
        one("e.weight", (7, 6, 8), (1, 8, 2), expert=2, is_transposed=True),
    ),
    "of heads": (
        gated_qkv(QKV)["attn.qkv"], "x.weight", (40, 6),
        [
            (
                Piece(f"{AT}q.weight", (40, 6), of_heads=(0, 5, 10)),
                *(Piece(f"{AT}{x}.weight", (10, 6), of_heads=(0, 5, 5)) for x in "kv"),
            ),
        ],
    ),
    "gate of heads": (
        gated_qkv(QKV)["attn.out_gate"], "x.weight", (20, 6), one("q.weight", (40, 6), of_heads=(5, 5, 10)),
    ),
    "otherwise": (
        Held(("a",), otherwise=Held(("b",), 1, otherwise=Held(("c",)))), "x.bias", (4,),
        [*one("a.bias", (4,)), *one("b.bias", (8,), (4, 8, 1)), *one("c.bias", (4,))],
    ),
    "heads, or otherwise": (
        replace(gated_qkv(QKV)["attn.out_gate"], otherwise=Held(("g",))), "x.bias", (20,),
        [*one("q.bias", (40,), of_heads=(5, 5, 10)), *one("g.bias", (20,))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_a_tensor_is_made_of_these_rows(case: str) -> None:
    where, ours, shape, expected = PLACES[case]
    key = "mlp.experts.{i}.fc" if "experts" in ours else "x"
    assert Names({key: where}, {}).places(f"transformer.h.1.{ours}", shape, CONFIG) == expected


def test_keys_and_values_of_latent_attention_may_be_matrices_of_each_head() -> None:
    """A head has 2 numbers without positions in a key, and 5 in a value, of rows of 3."""
    names = Names({"kv_b": Held(("k", "v"), is_by_head=True, otherwise=Held(("kv",)))}, {})
    by_head, whole = names.places("transformer.h.1.kv_b.weight", (28, 3), LATENT)
    assert by_head == tuple(
        piece
        for head in range(4)
        for piece in (
            Piece(f"{AT}k.weight", (4, 3, 2), expert=head, is_transposed=True),
            Piece(f"{AT}v.weight", (4, 5, 3), expert=head),
        )
    )
    assert whole == (Piece(f"{AT}kv.weight", (28, 3)),)


def test_rows_of_heads_are_numbered() -> None:
    found = Piece("q", (12, 6), of_heads=(1, 2, 4)).row_numbers
    assert found is not None and np.array_equal(found, [1, 2, 5, 6, 9, 10])
    assert Piece("q", (12, 6), (0, 6, 1)).row_numbers is None


NAMES = Names(
    {"mlp.gate": "gate", "mlp.gate.bias": "correction", "norm": "n"}, {"transformer.ln_f": "last"}, "out", ("a.", "b."),
    "h", predicting={"mtp.proj": "eh", "norm": "own"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("transformer.h.2.mlp.gate.weight", ["b.h.2.gate.weight"]),
        ("transformer.h.2.mlp.gate.bias", ["b.h.2.correction"]),
        ("transformer.h.2.mlp.other.weight", []),
        ("transformer.ln_f.weight", ["b.last.weight"]),
        ("transformer.other.weight", []),
        ("lm_head.weight", ["out.weight", "b.out.weight", "language_model.out.weight"]),
    ],
)
def test_names_stand_behind_the_prefix(ours: str, theirs: list[str]) -> None:
    assert [[p.tensor for p in form] for form in NAMES.places(ours, (4,), CONFIG, "b.")] == [[one] for one in theirs]
    ((first,), *_) = NAMES.places("transformer.ln_f.weight", (4,), CONFIG)
    assert first.tensor == "a.last.weight", "the first is written"


def test_the_prefix_is_the_one_of_the_blocks() -> None:
    assert NAMES.prefix(["x.h.0.n", "b.h.0.n"]) == "b."
    assert NAMES.prefix(["b.n"]) == NAMES.prefix([]) == "a."
    assert NAMES.modules("norm") == ("n",) and NAMES.modules("other") == ()


def test_blocks_that_predict_are_behind_the_others_or_under_a_prefix() -> None:
    def tensors(names: Names | None, *ours: str) -> list[str]:
        assert names is not None
        return [form[0].tensor for one in ours for form in names.places(one, (4,), CONFIG)]

    norm, proj = "transformer.h.1.norm.weight", "transformer.h.1.mtp.proj.weight"
    assert tensors(NAMES.of_predicting(5, "b."), norm, proj) == ["b.h.6.own.weight", "b.h.6.eh.weight"]
    apart = replace(NAMES, predicting_prefix="mtp.")
    assert tensors(apart.of_predicting(5, "b."), norm, proj) == ["mtp.own.weight", "mtp.eh.weight"]
    assert replace(NAMES, predicting=None).of_predicting(5, "b.") is None
