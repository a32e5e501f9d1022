"""What a node announces: readable for all, known as its own only by its cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mdi.control.discovery import Announcement
from mdi.net.keys import new_secret

KEY, OTHER = new_secret(), new_secret()
NODE = Announcement.of("board", "192.0.2.7", 8088, 5088, "ab" * 8, KEY)


def test_only_a_key_of_the_cluster_knows_it() -> None:
    assert NODE.is_of((KEY,)) and NODE.is_of((OTHER, KEY))
    assert not NODE.is_of((OTHER,)) and not NODE.is_of(())


@pytest.mark.parametrize(
    "change", [{"addr": "192.0.2.8"}, {"port": 1}, {"ring_port": 1}, {"process": "0"}, {"salt": "0"}]
)
def test_a_copied_tag_announces_nobody_else(change: dict[str, object]) -> None:
    assert not replace(NODE, **change).is_of((KEY,))  # type: ignore[arg-type]


def test_two_nodes_of_one_key_have_nothing_in_common() -> None:
    other = Announcement.of(NODE.name, NODE.addr, NODE.port, NODE.ring_port, NODE.process, KEY)
    assert other.salt != NODE.salt and other.tag != NODE.tag


def test_what_is_announced_is_read_again() -> None:
    assert Announcement.parse(NODE.addr, NODE.port, NODE.fields()) == NODE


@pytest.mark.parametrize(
    "wrong", [{"ring": "x"}, {"ring": "70000"}, {"ring": "0"}, {"process": "p" * 41}, {"tag": "t" * 41}]
)
def test_what_cannot_be_read_is_nobody(wrong: dict[str, str]) -> None:
    assert Announcement.parse(NODE.addr, NODE.port, {**NODE.fields(), **wrong}) is None
    assert Announcement.parse(NODE.addr, NODE.port, {}) is None
