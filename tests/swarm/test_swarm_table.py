"""What nodes of a swarm know of each other: the latest announcements, for a minute, and nothing that makes no sense."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

import pytest

from mdi.control.swarm import (
    EXPIRY_S,
    FORMER_S,
    N_FORMER,
    N_TOLD,
    Announced,
    SwarmRequest,
    SwarmTable,
    announcements_of,
    message_bytes,
)
from mdi.errors import ControlError
from mdi.net.message import ANSWER_LIMIT_BYTES
from mdi.spec.arithmetic import Arithmetic
from mdi.spec.model_id import Formats

ARITHMETIC = Arithmetic("fused", Formats.one("int8"))


def announced(number: int = 0, version: int = 1, **changes: Any) -> Announced:
    one = Announced(
        "board", f"{number:016x}", version, "192.0.2.7", 8088, 5088, "org/model", "ab" * 32, ARITHMETIC, 32, 4, 9, True,
        12.5, 0.01,
    )  # fmt: skip
    return replace(one, **changes)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_latest_version_counts_and_repeating_keeps_nobody_alive() -> None:
    clock = Clock()
    table = SwarmTable(clock)
    table.add([announced(version=2, start=5)])
    table.add([announced(version=1, start=4)])
    assert [one.start for one in table.nodes] == [5]
    clock.now = EXPIRY_S - 1
    table.add([announced(version=2, start=5)])
    assert table.nodes[0].age_s == EXPIRY_S - 1
    clock.now = EXPIRY_S
    assert table.nodes == [] and table.versions == {}


def test_an_announcement_is_as_old_at_everybody_who_heard_of_it() -> None:
    """It goes from table to table in a circle, and expires at all of them a minute after it was made."""
    clock = Clock()
    tables = [SwarmTable(clock) for _ in range(5)]
    tables[0].add([announced()])
    for step in range(20):
        clock.now += 3.5
        giver, taker = tables[step % 5], tables[(step + 1) % 5]
        taker.add(announcements_of(giver.answer(SwarmRequest(known=taker.versions)), "a node"))
        assert all(one.age_s == pytest.approx(clock.now) for one in taker.nodes)
    assert not any(table.nodes for table in tables) and clock.now > EXPIRY_S


def test_only_what_is_new_is_told_and_the_caller_is_noted() -> None:
    table = SwarmTable(Clock())
    table.add([announced(1, 3), announced(2, 7)])
    told = table.answer(SwarmRequest(announced(9), {f"{1:016x}": 3, f"{2:016x}": 6}))
    assert [one["process"] for one in told["nodes"]] == [f"{2:016x}"]
    assert table.versions[f"{9:016x}"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": 33}, {"start": 9, "stop": 4}, {"speed": float("nan")}, {"speed": -1.0}, {"process": "x"}, {"port": 0},
        {"n_layer": 0}, {"age_s": -1.0}, {"name": "b" * 81}, {"version": -1}, {"weights": "ab"}, {"block_s": None},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    bad = {**asdict(announced()), **wrong}
    with pytest.raises(ControlError):
        announcements_of({"nodes": [bad]}, "a node")
    with pytest.raises(ControlError):
        SwarmRequest.from_json({"own": bad})


def test_a_table_has_a_largest_size() -> None:
    table = SwarmTable(Clock())
    for first in range(0, 5000, 1000):
        table.add([announced(first + i, age_s=1 / (1 + first + i)) for i in range(1000)])
    assert len(table.nodes) == 4096 and f"{4999:016x}" in table.versions
    with pytest.raises(ControlError):
        announcements_of({"nodes": [asdict(announced(i)) for i in range(4097)]}, "a node")


def test_an_answer_has_the_newest_announcements() -> None:
    """Over a slow link a longer one would be late each time."""
    table = SwarmTable(Clock())
    ages = list(range(50)) * 20
    random.Random(1).shuffle(ages)
    table.add([announced(number, age_s=float(age)) for number, age in enumerate(ages)])
    told = [one["age_s"] for one in table.answer(SwarmRequest())["nodes"]]
    assert told == sorted(map(float, ages))[:N_TOLD]


def test_where_nodes_were_is_forgotten_at_last() -> None:
    clock = Clock()
    table = SwarmTable(clock)
    table.add([announced(number, ring_port=1 + number) for number in range(2 * N_FORMER)])
    clock.now = EXPIRY_S
    assert len(table.former) == N_FORMER
    table.add([announced(9999, ring_port=2 * N_FORMER)])
    assert len(table.former) == N_FORMER - 1, "somebody is there"
    clock.now = FORMER_S
    assert table.former == [announced(9999, ring_port=2 * N_FORMER)]


def test_messages_of_a_thousand_nodes_are_far_below_their_limits() -> None:
    table = SwarmTable(Clock())
    rng = random.Random(1)
    table.add([announced(rng.getrandbits(64), rng.randrange(10**6), age_s=rng.uniform(0, 50)) for _ in range(1000)])
    request = SwarmRequest(announced(), table.versions)
    assert message_bytes(request) < 64_000
    assert message_bytes(table.answer(SwarmRequest())) < 100_000 < ANSWER_LIMIT_BYTES
    assert message_bytes(table.answer(request)) < 100
