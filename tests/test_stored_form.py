"""Only the reader of the stored form of a model asks for its fields; all other code reads a ModelSpec."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from mdi.model.plain import ModelConfig

SRC = Path(__file__).resolve().parents[1] / "src"
# What a model is called, which is no part of what it computes.
NAMES = {"name", "hf_config"}
FIELDS = {entry.name for entry in dataclasses.fields(ModelConfig)} - NAMES | {"rope_n_elem"}
# What no other class has. The rest, such as n_head, counts if what it is asked of is called a config.
OWN = {
    "block_size", "padded_vocab_size", "norm_class_name", "norm_qk_type", "parallel_residual", "n_query_groups", "attn_bias",
    "attention_scores_scalar", "sliding_window_size", "sliding_window_indices", "attention_logit_softcapping", "rope_base",
    "rotary_percentage", "rope_adjustments", "rope_indices", "mlp_class_name", "n_expert", "first_k_dense_replace",
    "latent_attention", "learned_positions", "norm_after_residual", "scale_embeddings", "final_logit_softcapping",
}  # fmt: skip
# Where the form is read and written.
OWNERS = ("mdi/families/", "mdi/model/plain.py")
# Others, and why. This list must only get shorter.
STILL = {
    "mdi/checkpoint/hfconfig.py": "compares the stored form with a config.json, field by field",
    "mdi/checkpoint/manifest.py": "checks that a file agrees with the stored form in it, which may describe no model",
    "mdi/control/messages.py": "checks a request against the stored form in it, which may describe no model",
}


def reads(code: str) -> Iterator[int]:
    """Lines that ask for a field of the stored form."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and node.attr in FIELDS:
            of = node.value.attr if isinstance(node.value, ast.Attribute) else ast.unparse(node.value)
            if node.attr in OWN or "config" in of.lower():
                yield node.lineno


@pytest.mark.parametrize(
    "code", ["config.n_layer", "self._config.n_embd", "source.config.head_size", "x.block_size", "of(config).n_expert"]
)
def test_reads_of_the_stored_form_are_found(code: str) -> None:
    assert list(reads(code))


@pytest.mark.parametrize("code", ["spec.n_layer", "mixer.n_head", "config.name", "config.plain()", "self.n_embd"])
def test_others_are_not(code: str) -> None:
    assert not list(reads(code))


def test_only_its_owners_read_the_stored_form() -> None:
    assert OWN <= FIELDS
    found = {
        str(path.relative_to(SRC)): lines
        for path in sorted((SRC / "mdi").rglob("*.py"))
        if not str(path.relative_to(SRC)).startswith(OWNERS)
        and (lines := list(reads(path.read_text(encoding="utf-8"))))
    }
    assert found.keys() == STILL.keys(), {path: found.get(path) for path in found.keys() ^ STILL.keys()}
