"""Mutants of how commands end."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "a server that a signal ends takes torch down first",
        "cli.serve:run",
        "Obeyed(0)",
        "0",
        "tests/test_cli.py::test_a_server_that_a_signal_ends_goes_at_once_with_status_0",
    ),
    Mutant(
        "an end by a signal with status 0 is as slow as any other",
        "leave",
        " and not isinstance(status, Obeyed)",
        "",
        "tests/test_cli.py::test_an_interrupted_process_ends_at_once",
    ),
    Mutant(
        "a mistyped code of an invitation is a failure of the network",
        "code_bytes",
        "UsageError(",
        "AccessError(",
        "tests/security/test_join.py::test_wrong_usage_ends_with_2",
    ),
]
