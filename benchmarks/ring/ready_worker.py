"""How long a secondary takes from /init to READY, with its chunk in the page cache; one process per time that is taken.

Options: {"chunk": FILE}, the chunk of secondary 0 with its siblings' cut.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

from mdi.checkpoint.chunks import ChunkFile
from mdi.control.client import ControlClient
from mdi.control.messages import InitRequest, PartSpec
from mdi.errors import ControlError
from mdi.run.local import LocalRing
from mdi.spec.extent import Extent
from peers.protocol import Case, serve

PIECE = 1 << 24


class Secondary(LocalRing):
    """One that has its chunk.

    Args:
        folder: of its cache, where it keeps which files it has hashed.
    """

    def __init__(self, chunk: Path, folder: Path) -> None:
        super().__init__(2, "cpu,cpu", 1, None, False, False)
        self._own = ["--chunk", str(chunk), "--cache-dir", str(folder)]

    def command(self, path: Path, index: int) -> list[str]:
        return [*super().command(path, index), *self._own]


class ReadySystem:
    """A "system" whose numbers are `hashed_ready_s` and `known_ready_s`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._chunk = Path(options["chunk"])

    def run(self, case: Case) -> dict[str, Any]:
        with self._chunk.open("rb") as file:  # into the page cache
            while file.read(PIECE):
                pass
        with tempfile.TemporaryDirectory(prefix="mdi-ready-") as name:
            hashed_s, known_s = self._once(Path(name)), self._once(Path(name))
        return {"times_s": [], "hashed_ready_s": hashed_s, "known_ready_s": known_s}

    def _once(self, folder: Path) -> float:
        with Secondary(self._chunk, folder) as ring:
            client = ControlClient(ring.cluster.secondaries[0])
            while not answers(client):
                ring.check()
                time.sleep(0.01)
            return time_until_ready(self._chunk, client)

    def end(self) -> dict[str, Any]:
        return {}


def answers(client: ControlClient) -> bool:
    try:
        client.status()
    except ControlError:
        return False
    return True


def time_until_ready(path: Path, client: ControlClient) -> float:
    """Seconds from /init until the status says READY; the run is then called off."""
    chunk = ChunkFile(path)
    manifest, run = chunk.manifest, f"{secrets.randbits(64):016x}"
    parts = tuple(PartSpec(p.name, p.sha256, p.n_bytes) for p in manifest.parts)
    request = InitRequest(
        run=run, epoch=run, index=1, names=("starter", "secondary0"), placement="ready", next_addr="127.0.0.1", next_port=1,
        model=chunk.model_id, blocks=manifest.blocks, parts=parts, extent=Extent(manifest.config.block_size),
    )  # fmt: skip
    begin = time.perf_counter()
    client.init(request)
    while (status := client.status(run))["state"] != "READY":
        if status["state"] != "LOADING" or status["missing"]:
            raise SystemExit(f"the secondary did not take its weights from the chunk: {status}")
        time.sleep(0.002)
    ready_s = time.perf_counter() - begin
    client.stop(run)
    while client.status()["state"] not in ("IDLE", "READY") or client.status()["progress"] is not None:
        time.sleep(0.01)
    return ready_s


if __name__ == "__main__":
    serve(ReadySystem)
