"""The scenario `ready`: a process that hashes its chunk, and one that finds the record of that."""

from pathlib import Path

import pytest

from mdi.checkpoint.chunks import find_chunk
from mdi.cli import launch
from peers.protocol import Case
from ring.ready_worker import ReadySystem
from tiny_checkpoint import write_checkpoint


@pytest.mark.slow
def test_a_secondary_takes_its_chunk_and_is_ready(tmp_path: Path) -> None:
    ckpt = write_checkpoint(tmp_path / "tiny")
    assert launch("prepare-model", [str(ckpt), "--layers", "0,5", "--quantize", "int8"]) == 0
    found = ReadySystem({"chunk": str(find_chunk(ckpt, 2, "secondary0", "int8"))}).run(Case(1, 1, 1))
    assert found["hashed_ready_s"] > 0 and found["known_ready_s"] > 0
