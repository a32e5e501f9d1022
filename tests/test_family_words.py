"""No code but the families' own files asks for a family by its name, or by litgpt's name of a class."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mdi.families.registry import FAMILIES, GGUF
from mdi.model.plain import NAME_WORDS

SRC = Path(__file__).resolve().parents[1] / "src"
# What says a family, as a variable, a field or a key.
SUBJECTS = {
    "model_type", "architecture", "architectures", "arch", "general.architecture", "mlp_class_name", "norm_class_name",
    "norm_qk_type", "PLAIN_MLPS",
}  # fmt: skip
# What a family or a class of litgpt's is called by.
CLASSES = {"LLaMAMLP", "LLaMAMoE", "GemmaMLP", "GptNeoxMLP", "ReluMLP", "RMSNorm", "LayerNorm", *NAME_WORDS}
CLASSES |= {*FAMILIES, *GGUF, *(family.architecture for family in FAMILIES.values())}
SEARCHES = {"startswith", "endswith", "match", "fullmatch", "search", "removeprefix", "index", "find", "count"}
ANY = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(SUBJECTS | CLASSES)))})\b")  # to parse all files takes seconds
# Where it is known what they mean: the families, the plain form and its reader.
OWNERS = ("mdi/families/", "mdi/model/plain.py")


def words_of(tree: ast.AST) -> set[str]:
    """Names, attributes and texts in an expression."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def questions(code: str) -> Iterator[int]:
    """Lines with a test of equality, of a beginning, or of a pattern of what says a family."""
    for node in ast.walk(ast.parse(code)) if ANY.search(code) else ():
        asked = False
        if isinstance(node, ast.Compare):
            asked = not all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = node.func.attr in SEARCHES
        elif isinstance(node, ast.match_case):
            asked = True
        if asked and words_of(node.pattern if isinstance(node, ast.match_case) else node) & (SUBJECTS | CLASSES):
            yield getattr(node, "lineno", 0) or node.pattern.lineno  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "code",
    [
        'config.mlp_class_name == "LLaMAMoE"',
        'kind in ("GptNeoxMLP", "ReluMLP")',
        'hf["model_type"].startswith("gemma")',
        're.fullmatch("qwen.*", hf.get("model_type"))',
        'arch != "llama"',
        '"Gemma" in config.name',
        'kind in ("phi2", "phi3")',
        'name == "Glm4MoeForCausalLM"',
        'match kind:\n    case "GemmaMLP": pass',
    ],
)
def test_questions_for_a_family_are_found(code: str) -> None:
    assert list(questions(code))


@pytest.mark.parametrize(
    "code", ['FAMILIES.get(hf["model_type"]) is None', 'spec.mlp.activation == "silu"', 'x["arch"]']
)
def test_others_are_not(code: str) -> None:
    assert not list(questions(code))


def test_no_code_but_the_families_asks_for_a_family() -> None:
    found = {
        str(path.relative_to(SRC)): lines
        for path in sorted(SRC.rglob("*.py"))
        if not str(path.relative_to(SRC)).startswith(OWNERS)
        and (lines := list(questions(path.read_text(encoding="utf-8"))))
    }
    assert not found
