"""Profiles: their JSON form, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clusters import cluster, node
from mdi.errors import UsageError
from mdi.placement.profile import HOP_S, ClusterProfile, LinkProfile, Links, boards, read_profile


def three() -> ClusterProfile:
    nodes = (node("starter", cached_parts=("ab",), head_s=((1, 0.5),)), node("secondary0"), node("secondary1"))
    return cluster(*nodes, links=(LinkProfile("starter", "secondary0", 2e-3, 1e7),))


@pytest.mark.parametrize("profile", [three(), boards()])
def test_json_there_and_back(profile: ClusterProfile) -> None:
    assert read_profile(json.dumps(profile.to_json()), "file") == profile


def changed(path: list[Any], value: Any) -> Any:
    data: Any = three().to_json()
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["nodes"], [], "nodes: expected a list of length >= 1"),
        (["nodes"], {}, "nodes: expected a list"),
        (["nodes", 0], 3, "nodes[0]: expected an object"),
        (["nodes", 1, "name"], "starter", "two nodes are called 'starter'"),
        (["nodes", 1, "memory_bytes"], -1, "nodes[1].memory_bytes: expected a whole number >= 0, found -1"),
        (["nodes", 1, "memory_bytes"], 1.5, "whole number"),
        (["nodes", 1, "memory_bytes"], True, "found True"),
        (["nodes", 1, "memory_bytes"], KeyError, "'memory_bytes' is missing"),
        (["nodes", 1, "colour"], "red", "unknown field 'colour'"),
        (["nodes", 1, "n_cores"], 0, r"n_cores: expected a number > 0.0, found 0"),
        (["nodes", 1, "n_cores"], float("nan"), "found nan"),
        (["nodes", 1, "block_s"], [[4, 1.0], [1, 2.0]], "rows must rise"),
        (["nodes", 1, "block_s"], [[0, 1.0]], "block_s[0][0]: expected a whole number >= 1, found 0"),
        (["nodes", 1, "block_s"], [[1, 0]], "block_s[0][1]: expected a number > 0.0, found 0"),
        (["nodes", 1, "block_s"], [1], "block_s[0]: expected a list, found 1"),
        (["nodes", 1, "block_s"], "fast", "block_s: expected a list, found 'fast'"),
        (["nodes", 1, "cached_parts"], [3], "cached_parts[0]: expected a string, found 3"),
        (["links", 0, "bytes_s"], 0, "bytes_s: expected a number > 0.0, found 0"),
        (["links", 0, "target"], "nobody", "no node 'nobody'"),
        (["links", 0, "round_trip_s"], "1ms", "found '1ms'"),
        (["format"], "", "format: expected a string"),
    ],
)
def test_nonsense_is_refused_by_name(path: list[Any], value: Any, words: str) -> None:
    with pytest.raises(UsageError) as e:
        ClusterProfile.from_json(changed(path, value), "file")
    assert words in str(e.value)
    assert "\n" not in str(e.value)


def test_a_node_without_any_time_is_refused() -> None:
    data = changed(["nodes", 1, "block_s"], [])
    data["nodes"][1]["read_bytes_s"] = 0
    with pytest.raises(UsageError) as e:
        ClusterProfile.from_json(data)
    assert "block_s" in str(e.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "3", "null"])
def test_what_is_no_profile_at_all(text: str) -> None:
    with pytest.raises(UsageError) as e:
        read_profile(text, "here")
    assert "here" in str(e.value)


def test_links_that_were_not_measured_are_taken_for_the_worst_near_them() -> None:
    measured = (LinkProfile("a", "b", 1e-3, 1e8), LinkProfile("b", "c", 5e-3, 1e9), LinkProfile("c", "d", 2e-3, 1e6))
    links = Links(cluster(*map(node, "abcdef"), links=measured))
    assert links.of(0, 1) == (1e-3, 1e8)
    assert links.of(1, 0) == (5e-3, 1e8)  # b's other link is slower, this one narrower
    assert links.of(0, 3) == (2e-3, 1e6)
    assert links.of(0, 4) == (1e-3, 1e8)
    assert links.of(4, 5) == (300e-6, 125e6)
    assert links.seconds(0, 1, 1e5) == pytest.approx(HOP_S + 0.5e-3 + 1e-3)
    assert links.transmit_s(0, 1, 1e5) == pytest.approx(1e-3)
