"""Mutants of what the doctor says."""

from __future__ import annotations

from mutants.mutant import Mutant

ANOTHER_KEY = "tests/test_doctor.py::test_a_node_with_another_key_does_not_hang"

MUTANTS = [
    Mutant(
        "a node with another key is said to hang",
        "_node_problems",
        "not route.control.is_ok and not is_locked_out",
        "not route.control.is_ok",
        ANOTHER_KEY,
    ),
    Mutant(
        "a control port that nothing listens on is not told beside another key",
        "_node_problems",
        '(route.control.problem, route.ring.problem) == ("silent", "key")',
        'route.ring.problem == "key"',
        ANOTHER_KEY,
    ),
]
