"""Which memory is brought onto huge pages."""

from __future__ import annotations

import sys

import pytest
import torch

from peers import huge_pages
from peers.huge_pages import HUGE_PAGE, anonymous_regions, filled_pieces, use_huge_pages

MAPS = """\
00400000-00900000 r-xp 00000000 08:01 1234                               /usr/bin/python3
00900000-01900000 rw-p 00000000 00:00 0                                  [heap]
7f0000100000-7f0000a00000 rw-p 00000000 00:00 0
7f0001000000-7f0001400000 r--p 00000000 00:00 0
7f0002000000-7f0002400000 rw-p 00000000 08:01 77                         /models/a file.safetensors
7f0003000000-7f0003100000 rw-p 00000000 00:00 0
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]
"""


def test_only_writable_memory_of_the_process_itself_is_considered_and_cut_to_whole_pages() -> None:
    assert list(anonymous_regions(MAPS)) == [(0xA00000, 0x1800000), (0x7F0000200000, 0x7F0000A00000)]


@pytest.mark.parametrize(
    ("pages", "runs"),
    [
        ([], []),
        ([1, 1, 1, 1], [(0, 2)]),
        ([1, 1, 1, 0], [(0, 1)]),
        ([0, 1, 1, 1], [(1, 2)]),
        ([1, 1, 0, 1, 1, 1, 3, 1], [(0, 1), (2, 4)]),
        ([1, 1, 1], [(0, 1)]),
    ],
)
def test_pieces_with_a_page_that_is_not_there_are_left_out(pages: list[int], runs: list[tuple[int, int]]) -> None:
    assert list(filled_pieces(bytes(pages), 2)) == runs


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_numbers_stay_what_they_are() -> None:
    before = torch.arange(16 << 20, dtype=torch.int32)
    asked = use_huge_pages()
    assert asked == 0 or asked >= before.nbytes - 2 * HUGE_PAGE  # 0 where the kernel has none
    assert torch.equal(before, torch.arange(16 << 20, dtype=torch.int32))


def test_another_system_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    assert use_huge_pages() == 0
