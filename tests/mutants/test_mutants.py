"""The tables of mutants fit the code; `make mutants` tries them."""

from __future__ import annotations

import pytest

from mutants.mutant import PROJECT, Mutant, all_mutants


@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda m: f"{m.function}-{m.what}")
def test_a_mutant_changes_what_is_there_and_names_its_tests(mutant: Mutant) -> None:
    mutant.place()
    assert mutant.new != mutant.old
    assert mutant.tests and all((PROJECT / test.partition("::")[0]).is_file() for test in mutant.tests.split())


def test_no_two_mutants_are_the_same() -> None:
    changes = [(mutant.place(), mutant.new) for mutant in all_mutants()]
    assert len(set(changes)) == len(changes)
