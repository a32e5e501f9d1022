"""The benchmarks' ring gives what a round is counted from."""

import os
from pathlib import Path

from peers.protocol import Case
from ring.ring_worker import RingSystem
from tiny_checkpoint import tiny_config, write_checkpoint


def test_a_round_of_two_nodes_has_times_and_bytes(tmp_path: Path) -> None:
    ckpt = write_checkpoint(tmp_path / "tiny")
    cores = os.sched_getaffinity(0)  # the ring pins its starter, which is this process
    options = {
        "nodes": 2,
        "threads": 1,
        "cores": sorted(cores)[:2],
        "ckpt": str(ckpt),
        "max_length": 24,
        "flags": ["--dtype", "float32"],
    }
    system = RingSystem(options)
    try:
        found = system.run(Case(2, 8, 4))
    finally:
        ended = system.end()
        os.sched_setaffinity(0, cores)
    assert [len(times) for times in found["times_s"]] == [4, 4] == [len(ids) for ids in found["ids"]]
    assert found["link_bytes_per_row"] > 4 * tiny_config().n_embd
    assert len(ended["nodes"]) == 2 and ended["secondaries"][0]["resident_bytes"] > 0
