"""Nodes of one machine are not each given all of its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdi.placement.profile import ClusterProfile, LinkProfile, NodeProfile, left_over, share_memory

GB = 10**9
NODE = NodeProfile("x", "cpu", 1.0, 8 * GB, GB, 0.0, 1e9, (), (), 0, (), 8 * GB)


@pytest.mark.parametrize(
    ("changes", "hosts", "expected"),
    [
        ([{}, {}], "ab", [8, 8]),  # two machines
        ([{}, {}], "aa", [4, 4]),
        ([{}, {}, {}, {}], "abab", [4, 4, 4, 4]),
        ([{}, {"device": "cuda:0"}], "aa", [8, 8]),
        ([{"device": "cuda"}, {"device": "cuda:0"}], "aa", [4, 4]),
        ([{"memory_bytes": 2 * GB}, {"memory_bytes": 6 * GB}], "aa", [2, 6]),  # by the limits of their groups
        ([{"memory_bytes": 2 * GB}, {}], "aa", [1.6, 6.4]),
        ([{"process_bytes": GB, "memory_bytes": 9 * GB}, {}], "aa", [5, 4]),  # the process is there already
        ([{"held_bytes": 4 * GB, "memory_bytes": 12 * GB}, {}], "aa", [8, 4]),  # weights of the last run
        ([{"shared_bytes": 0}, {}], "aa", [8, 8]),  # unknown
        ([{"shared_bytes": 6 * GB}, {}], "aa", [3, 3]),  # the later one saw less
    ],
)
def test_what_is_there_once(changes: list[dict[str, int]], hosts: str, expected: list[float]) -> None:
    found = share_memory([replace(NODE, **change) for change in changes], list(hosts))  # type: ignore[arg-type]
    assert [node.memory_bytes / GB for node in found] == pytest.approx(expected)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3), st.sampled_from("ab")), min_size=1),
    st.integers(1, 12),
)
def test_never_more_than_there_is(numbers: list[tuple[int, int, int, str]], free: int) -> None:
    nodes = [
        replace(NODE, memory_bytes=claim + held + process, held_bytes=held, process_bytes=process, shared_bytes=free)
        for claim, held, process, _ in numbers
    ]
    hosts = [host for *_, host in numbers]
    found = share_memory(nodes, hosts)
    for host in "ab":
        new = sum(
            node.memory_bytes - node.held_bytes - node.process_bytes
            for node, where in zip(found, hosts, strict=True)
            if where == host
        )
        assert 0 <= new <= max(free, 0) or not hosts.count(host)
    assert all(a.memory_bytes <= b.memory_bytes for a, b in zip(found, nodes, strict=True))
    assert all(node.memory_bytes >= node.held_bytes + node.process_bytes for node in found)


def test_another_model_gets_what_is_left_of_memory_and_time() -> None:
    """Two nodes of one machine share what is free there; a ring that a node takes part in takes half of its turns."""
    named = [
        replace(NODE, name=name, machine=host, block_s=((1, 0.5),), process_bytes=GB)
        for name, host in zip("abc", "xyy", strict=True)
    ]
    links = (LinkProfile("a", "b", 1e-3, 1e8), LinkProfile("a", "d", 1e-3, 1e8))
    whole = ClusterProfile((*named, replace(NODE, name="d")), links, "", "", "float32")
    found = left_over(whole, {"a": GB, "b": 4 * GB, "c": 4 * GB}, {"a": 1, "b": 2})
    assert [node.name for node in found.nodes] == ["a", "b", "c"] and found.links == links[:1]
    assert [node.memory_bytes / GB for node in found.nodes] == [2, 3, 3], "the process is there already"
    assert [node.block_s for node in found.nodes] == [((1, 1.0),), ((1, 1.5),), ((1, 0.5),)]
    assert [node.read_bytes_s for node in found.nodes] == pytest.approx([NODE.read_bytes_s / n for n in (2, 3, 1)])


def test_limits_of_one_node_are_not_those_of_its_machine() -> None:
    whole = ClusterProfile(tuple(replace(NODE, name=name, machine="x") for name in "abc"), (), "", "", "float32")
    found = left_over(whole, {"a": 16 * GB, "b": GB, "c": 16 * GB}, {})
    assert [node.memory_bytes / GB for node in found.nodes] == pytest.approx([16 * 16 / 33, 16 / 33, 16 * 16 / 33])


def test_a_slower_node_computes_attention_slower() -> None:
    assert replace(NODE, attention_macs_s=8e9).at_pace(4).attention_macs_s == 2e9
