"""A secondary that gets SIGTERM in the middle of a run, as a process: its blocks are taken over first."""

from __future__ import annotations

import signal
from pathlib import Path

from frame_starter import frame_starter
from loopback import DEADLINE_S
from mdi.spec.cluster import load_cluster
from processes import SOON_S, Cluster


def test_a_node_that_is_told_to_end_waits_until_its_blocks_are_elsewhere(ring: Cluster, checkpoint: Path) -> None:
    entry = load_cluster(ring.path).secondaries[0]
    with frame_starter(entry, checkpoint) as starter:
        starter.form(hand_over=True)
        ring[0].signal(signal.SIGTERM)
        assert starter.ring is not None
        assert starter.ring.recv(DEADLINE_S) is None and starter.ring.leaving == ("secondary0",)
        assert ring[0].child.poll() is None
        starter.ring.stop("its blocks are elsewhere")
        assert ring[0].wait(SOON_S) == 0, ring[0].story()
