"""What a comparison consists of: systems that are loaded, cases that they run in turns, and ratios of their numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from peers.protocol import Case
from side_by_side.measures import Found, Summary, pair_ratios


@dataclass(frozen=True)
class SystemSpec:
    """One process (for a ring: several) that stays loaded for the whole scenario.

    Attributes:
        kind: "ring", "ready", "llama.cpp", "litgpt", "transformers" or "read".
        options: see the module of its worker.
        cores: that it may use.
        environment: variables that its process has besides.
        instructions: the instruction set that these make it use; "" is its own choice.
        group: systems of one group are loaded together; one group is run after the other.
    """

    name: str
    kind: str
    options: dict[str, Any]
    cores: tuple[int, ...]
    environment: dict[str, str] = field(default_factory=dict)
    instructions: str = ""
    group: str = ""


@dataclass(frozen=True)
class Run:
    """A case on a system, under a label of its own."""

    label: str
    system: str
    case: Case


@dataclass(frozen=True)
class Check:
    """A ratio, round by round: factor x (number of one run) / (the largest number of some others, if there are any).

    Attributes:
        metrics: names of the numbers above and below.
        unit: how the ratio is written: "x", "%" or " s".
    """

    what: str
    above: str
    below: tuple[str, ...]
    metrics: tuple[str, str] = ("decode_tokens_per_s", "decode_tokens_per_s")
    factor: float = 1.0
    unit: str = "x"


@dataclass(frozen=True)
class CheckResult:
    """What was measured of a `Check`; `error` where it could not be."""

    what: str
    unit: str
    measured: Summary | None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "measured": self.measured and self.measured.to_json()}


@dataclass
class Outcome:
    """What a scenario gave: numbers by run and round, what each system said at its end, and what failed."""

    rounds: dict[str, list[Found]] = field(default_factory=dict)
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    ids: dict[str, list[list[int]]] = field(default_factory=dict)  # of the last round


@dataclass(frozen=True)
class Scenario:
    """Attributes:
    finish: further results, from what the systems said at their end.
    """

    name: str
    title: str
    systems: tuple[SystemSpec, ...]
    runs: tuple[Run, ...]
    checks: tuple[Check, ...] = ()
    finish: Callable[[Outcome], list[CheckResult]] | None = None
    repeats: int = 5

    def results(self, outcome: Outcome) -> list[CheckResult]:
        """All ratios; one whose system failed says so."""
        found = [_result(check, self, outcome) for check in self.checks]
        return found + (self.finish(outcome) if self.finish is not None else [])


def _result(check: Check, scenario: Scenario, outcome: Outcome) -> CheckResult:
    system_of = {run.label: run.system for run in scenario.runs}
    for label in (check.above, *check.below):
        if not outcome.rounds.get(label):
            error = outcome.errors.get(label) or outcome.errors.get(system_of[label]) or "it was not run"
            return CheckResult(check.what, check.unit, None, error)
    below = [outcome.rounds[label] for label in check.below]
    try:
        ratios = pair_ratios(outcome.rounds[check.above], below, check.metrics, check.factor)
    except KeyError as e:
        error = f"{e} was not measured: too few tokens"
        return CheckResult(check.what, check.unit, None, error)
    return CheckResult(check.what, check.unit, Summary.of(ratios))
