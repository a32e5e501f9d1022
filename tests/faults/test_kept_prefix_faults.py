"""Kept prefixes on disks that fail and processes that are killed at any step: what is read is right, or nothing is.

See kept_numbers.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kept_numbers import HANG_S as DEADLINE_S
from kept_numbers import LIMIT_BYTES, OWNER, Numbers, use
from mdi import files as mdi_files
from mdi.engine import kept_prefixes
from mdi.engine.kept_prefixes import KeptFiles, Secrets
from mdi.net.keys import KeyFile, new_secret, write_keys

CALLS = (
    (os, "replace"),
    (os, "fsync"),
    (os, "utime"),
    (Path, "read_bytes"),
    (Path, "exists"),
    (Path, "mkdir"),
    (Path, "unlink"),
)


class Life:
    """One life of a process, in which calls of the system fail; or all of them from one on, because it was killed then."""

    def __init__(self, rng: random.Random, patch: pytest.MonkeyPatch, number: int) -> None:
        self._left = rng.randrange(1, 60) if rng.random() < 0.5 else None
        self._rng, self._share, self.is_dead = rng, rng.choice([0.0, 0.0, 0.05, 0.5]), False
        offset = rng.choice([0.0, 0.0, -4e8, 4e8])
        now = time.time
        patch.setattr(kept_prefixes.time, "time", lambda: now() + offset)
        patch.setattr(mdi_files.os, "getpid", lambda: (1 << 30) + number)  # of which there is none afterwards
        for of, name in CALLS:
            patch.setattr(of, name, self._failing(getattr(of, name), name))
        self.free = lambda: 0 if rng.random() < self._share else 1 << 40

    def _failing(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "fsync" and not any(".kv" in str(one) or OWNER in str(one) for one in args):
                return real(*args, **kwargs)
            if self._left is not None:
                self._left -= 1
                self.is_dead = self.is_dead or self._left <= 0
            if self.is_dead or self._rng.random() < self._share:
                raise OSError(self._rng.choice([errno.ENOSPC, errno.EROFS, errno.EIO]), "made up")
            return None if name == "fsync" else real(*args, **kwargs)

        return call


def harm(rng: random.Random, folder: Path) -> None:
    for path in sorted(folder.rglob("*.kv")):
        data, what = path.read_bytes(), rng.randrange(50)
        at = rng.randrange(max(1, len(data)))
        if what == 0 and data:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        elif what == 1:
            path.write_bytes(data[:at])
        elif 5 <= what <= 9:
            path.write_bytes(rng.choice(sorted(folder.rglob("*.kv"))).read_bytes())
        elif what == 3:
            os.utime(path, (0, rng.choice([0, 1e10])))
        elif what == 4:
            path.rename(path.with_name(f"{path.name}.{(1 << 30) + 1}.part"))


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 220), marks=pytest.mark.slow)])
def test_no_step_at_which_a_disk_fails_or_a_process_ends_gives_wrong_numbers(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_keys(tmp_path / "cluster", (new_secret(),))
    keys, n_read = KeyFile(tmp_path / "cluster"), 0
    for seed in seeds:
        rng, folders = random.Random(seed), [tmp_path / str(seed) / "a", tmp_path / str(seed) / "b"]
        for life in range(4):
            cut = rng.randrange(1, 4)
            caches = [Numbers(range(cut)), Numbers(range(cut, 4))]
            with monkeypatch.context() as patch:
                fails = Life(rng, patch, life)
                nodes = [KeptFiles(one, LIMIT_BYTES, Secrets(one, keys), fails.free, 1e12) for one in folders]
                for _ in range(6):
                    n_read += use(rng, nodes, caches)
                for files in nodes:
                    files.close(DEADLINE_S)
            for folder in folders:
                harm(rng, folder)
        for folder in folders:
            files = KeptFiles(folder, LIMIT_BYTES, Secrets(folder, keys))
            files.sweep()
            kept = list(files.files())
            assert not [path for path, _, _ in kept if path.suffix == ".part"], f"seed {seed}"
            assert sum(size for _, size, _ in kept) <= LIMIT_BYTES * 9 // 8, f"seed {seed}: it grows"
    assert n_read > len(seeds), "hardly anything was read"


WRITER = """
import random, sys
from pathlib import Path
from mdi.engine.kept_prefixes import KeptFiles, Secrets
from kept_numbers import LIMIT_BYTES, Numbers, use
folder, n = Path(sys.argv[1]), 0
files, caches = KeptFiles(folder, LIMIT_BYTES, Secrets(folder, None), lambda: 1 << 40, 1e12), Numbers(range(4))
print("ready", flush=True)
while True:
    use(random.Random(n := n + 1), [files], [caches])
"""


def test_what_processes_that_were_killed_leave_is_right_or_goes(tmp_path: Path) -> None:
    rng, n_read, caches = random.Random(1), 0, Numbers(range(4))
    places = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": places},
        )  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + DEADLINE_S
        while not any(tmp_path.rglob("*.kv")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.random() / 10)
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
        process.stdout.close()
        files = KeptFiles(tmp_path, LIMIT_BYTES, Secrets(tmp_path, None), lambda: 1 << 40, 1e12)
        files.sweep()
        assert not list(tmp_path.rglob("*.part"))
        assert sum(size for _, size, _ in files.files()) <= LIMIT_BYTES * 9 // 8
        for _ in range(20):
            n_read += use(rng, [files], [caches])
        files.close(DEADLINE_S)
    assert n_read
