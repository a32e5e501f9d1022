"""Kept prefixes on disks that fail and processes that are killed at any step: what is read is right, or nothing is.

Of each position a node keeps numbers that follow from the keys of its text, so that a wrong one is seen wherever it comes from.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopback import DEADLINE_S
from mdi import files as mdi_files
from mdi.engine import kept_prefixes
from mdi.engine.kept_prefixes import KeptFiles, Secrets
from mdi.engine.memory import page_keys
from mdi.engine.prefix_tasks import FETCH, FILL, FIND, KEEP, PrefixTask
from mdi.errors import EngineError
from mdi.kernels.stage_caches import CacheRun, Piece
from mdi.model.caches import PAGE, CacheClass, PageClass
from mdi.net.keys import KeyFile, new_secret, write_keys

OWNER = f"{'0' * 16}-{'1' * 16}"
LIMIT_BYTES = 150_000  # less than all texts take
N_TEXTS, N_PAGES, RUN = 6, 5, 2
CALLS = (
    (os, "replace"),
    (os, "fsync"),
    (os, "utime"),
    (Path, "read_bytes"),
    (Path, "exists"),
    (Path, "mkdir"),
    (Path, "unlink"),
)


class Numbers:
    """Caches of blocks with and without a window, whose rows follow from the keys of their text."""

    cache_type = "float32"

    def __init__(self, blocks: Collection[int]) -> None:
        self._blocks = blocks
        self.texts: dict[int, list[bytes]] = {}

    def classes_of_blocks(self) -> dict[int, CacheClass]:
        return {i: PageClass(3 if i % 2 else None, 1024) for i in self._blocks}

    def rows(self, seq_id: int, block: int, start: int, stop: int) -> np.ndarray:
        keys = self.texts[seq_id]
        seeds = [int.from_bytes(keys[i // PAGE][:3], "little") for i in range(start, stop)]
        return np.array([[seed, block, i] for i, seed in enumerate(seeds, start)], np.float32)

    def export(self, seq_id: int, start: int, stop: int, wanted: Collection[int] | None = None) -> CacheRun:
        pieces = {}
        for i in wanted or ():
            first = max(start, stop - 3) if i % 2 else start
            pieces[i] = Piece(first, (self.rows(seq_id, i, first, stop),))
        return CacheRun(start, stop, self.cache_type, pieces)

    def fill(self, seq_id: int, run: CacheRun) -> None:
        for i in self._blocks:
            piece = run.blocks[i]
            right = self.rows(seq_id, i, piece.first, run.stop)
            if i % 2 and piece.first != run.stop - 3:
                raise EngineError("another end")
            assert len(piece.arrays) == 1 and np.array_equal(piece.arrays[0], right), "wrong numbers"

    def free(self, seq_id: int) -> None: ...


def text(number: int) -> list[bytes]:
    """Keys of a text; some have the beginning of another one."""
    ids = [7 * (number // 2)] * (2 * PAGE) + [number] * ((N_PAGES - 2) * PAGE)
    return page_keys("seed", ids)


def task(kind: str, number: int, n: int, begin: int = 0, **of: Any) -> PrefixTask:
    keys = b"".join(text(number)[: n if kind in (KEEP,) else N_PAGES]).hex()
    return PrefixTask(kind, number, 0, OWNER, keys, RUN, PAGE * begin, PAGE * n, is_end=n == N_PAGES, **of)


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
        data, what = path.read_bytes(), rng.randrange(12)
        at = rng.randrange(max(1, len(data)))
        if what == 0 and data:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        elif what == 1:
            path.write_bytes(data[:at])
        elif what == 2:
            path.write_bytes(rng.choice(sorted(folder.rglob("*.kv"))).read_bytes())
        elif what == 3:
            os.utime(path, (0, rng.choice([0, 1e10])))
        elif what == 4:
            path.rename(path.with_name(f"{path.name}.{(1 << 30) + 1}.part"))


def use(rng: random.Random, nodes: list[KeptFiles], caches: list[Numbers]) -> int:
    """What a ring of two nodes does with a text: keep some of it, or look for it and read it. Returns pages that were read."""
    number = rng.randrange(N_TEXTS)
    for one in caches:
        one.texts[number] = text(number)

    def ask(asked: PrefixTask) -> PrefixTask:
        for files, one in zip(nodes, caches, strict=True):
            asked = PrefixTask.of(files.answer(asked, one).frame(0, 0))
        return asked

    if rng.random() < 0.6:
        for begin in range(0, N_PAGES, RUN):
            ask(task(KEEP, number, min(begin + RUN, N_PAGES), begin))
        assert all(files.flush(DEADLINE_S) for files in nodes), "it hangs"
        return 0
    asked = task(FIND, number, N_PAGES, ends=f"{(1 << N_PAGES) - 1:x}")
    found = ask(asked)
    if int(found.some, 16) > found.possible:
        fetch = replace(found, kind=FETCH, stop=PAGE * int(found.some, 16).bit_length())
        for _ in range(4):
            fetch = ask(fetch)
        found = ask(asked)
    if not found.possible:
        return 0
    stop = found.possible.bit_length()
    return stop * ask(replace(found, kind=FILL, start=0, stop=PAGE * stop)).is_done


N_TRIALS = int(os.environ.get("TRIALS", "40"))


def test_no_step_at_which_a_disk_fails_or_a_process_ends_gives_wrong_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_keys(tmp_path / "cluster", (new_secret(),))
    keys, n_read = KeyFile(tmp_path / "cluster"), 0
    for seed in range(N_TRIALS):
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
    assert n_read > N_TRIALS, "hardly anything was read"


WRITER = """
import random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_kept_prefix_faults import *
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
            [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)], stdout=subprocess.PIPE,
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
