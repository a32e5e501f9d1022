"""What the tests here share: one process that has imported transformers, which takes longer than most of what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forked_children import ForkedChildren

PYTHON = Path(__file__).parents[2] / ".venv-references" / "bin" / "python"
Transformers = Callable[..., str]


@pytest.fixture(scope="session")
def with_transformers() -> Iterator[ForkedChildren]:
    modules = ("json", "numpy", "torch", "transformers", "transformers.modeling_utils")
    modules = (*modules, "transformers.models.auto.modeling_auto")
    with ForkedChildren(*modules, python=PYTHON, HF_HUB_OFFLINE="1") as made:
        yield made


@pytest.fixture(scope="session")
def transformers(with_transformers: ForkedChildren, tmp_path_factory: pytest.TempPathFactory) -> Transformers:
    """Runs a program with arguments in the environment of `make references`; what it printed."""

    def run(program: str, *args: object) -> str:
        done = with_transformers.run(program, [str(arg) for arg in args], tmp_path_factory.mktemp("printed"))
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run
