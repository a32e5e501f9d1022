"""How long a secondary takes from /init to READY, with its chunk in the page cache; one process per time that is taken.

Options: {"chunk": FILE}, the chunk of secondary 0 with its siblings' cut.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from peers.protocol import Case, serve

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from overheads import secondary, time_until_ready  # noqa: E402

PIECE = 1 << 24


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
        with secondary(folder, self._chunk) as (_, client, _, _):
            return time_until_ready(self._chunk, client)

    def end(self) -> dict[str, Any]:
        return {}


if __name__ == "__main__":
    serve(ReadySystem)
