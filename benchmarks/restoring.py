#!/usr/bin/env python3
"""Which is faster: a node's lost caches restored from the rows that were sent to it (replay), or from token ids (tokens)?

Over three nodes in this process, one of which drops its caches and connections when every text has some tokens. Each setting is
tried both ways, in turns: how long until the first text has its next token, and until all have. What the run would
choose is shown beside the better one. Slow links are those of tests/faults, before the ring port of each node.

    restoring.py --setting 1x100 --setting 4x250 --setting 2x100@20ms,1Mbit --repeat 3
    restoring.py --ckpt FOLDER --quantize int8 --setting 1x100 --setting 1x1000
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import re
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from records import add_json_flag, save

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("src", "tests", "tests/faults")]

from recovery import note_forming  # noqa: E402
from recovery_rates import RESTORED, Ring, entries, secondaries  # noqa: E402

N_BEFORE, N_AFTER = 3, 40  # tokens of each text, before the failure and after it; the first texts have more by then
SETTINGS = ("1x20", "1x100", "1x900", "4x100", "4x250", "1x100@20ms,1Mbit", "2x100@20ms,1Mbit")


@dataclass(frozen=True)
class Setting:
    """So many texts of so many tokens; how slow each link of the ring is, 0 is as it is."""

    name: str
    n_texts: int
    n_prompt: int
    delay_s: float = 0.0
    bytes_s: float = 0.0

    @classmethod
    def of(cls, name: str) -> Setting:
        found = re.fullmatch(r"(\d+)x(\d+)(?:@(\d+)ms,(\d+)Mbit)?", name)
        if found is None:
            raise SystemExit(f"--setting {name}: TEXTSxTOKENS, or TEXTSxTOKENS@DELAYms,RATEMbit")
        n_texts, n_prompt, delay, rate = found.groups(default="0")
        return cls(name, int(n_texts), int(n_prompt), int(delay) / 1e3, int(rate) * 125e3)

    @property
    def length(self) -> int:
        return self.n_prompt + N_BEFORE + N_AFTER


@dataclass
class Row:
    """Seconds from the loss to the next token of the first text, and of the last one; `lost` is the number of the node."""

    setting: str
    lost: int
    wanted: str
    restored_by: str
    first_s: float
    all_s: float
    texts: list[list[int]]


def measure(args: argparse.Namespace, nodes: list[Any], setting: Setting) -> list[Row]:
    rows = []
    with contextlib.ExitStack() as stack:
        own = argparse.Namespace(**{**vars(args), "tokens": setting.length})
        places = entries(nodes, stack, setting.delay_s, setting.bytes_s)
        for _, lost, way in itertools.product(range(args.repeat), range(len(nodes)), RESTORED):
            ring = Ring(nodes, own, RESTORED[way] and args.replay_bytes, places, setting.n_texts)
            try:
                rows.append(lose(ring, setting, lost, way))
            finally:
                ring.close()
            print(f"{setting.name} node {lost + 1} {way} ({rows[-1].restored_by}): {rows[-1].first_s:.3f} s, "
                  f"all {rows[-1].all_s:.3f} s", flush=True)  # fmt: skip
    return rows


def lose(ring: Ring, setting: Setting, lost: int, way: str) -> Row:
    failed_s = 0.0

    def perhaps() -> None:
        nonlocal failed_s
        if not failed_s and min(len(sample.token_ids) for sample in samples) >= N_BEFORE:
            ring.fail(lost)
            failed_s = time.perf_counter()

    samples: list[Any] = []
    times = {"formed": 0.0}
    note_forming(ring.starter, times)
    for k in range(setting.n_texts):
        prompt = [1 + (7 * k + 3 * i) % 200 for i in range(setting.n_prompt)]
        samples.append(ring.submit(prompt, N_BEFORE + N_AFTER, perhaps))
    ring.starter.generate()
    (recovery,) = ring.starter.metrics().recoveries
    after = ([sample._begin + s for s in sample.token_times_s] for sample in samples)
    next_s = [found[0] for times_s in after if (found := [s for s in times_s if s > times["formed"]])]
    texts = [list(sample.token_ids) for sample in samples]
    waits = [moment - failed_s for moment in next_s]
    return Row(setting.name, lost + 1, way, recovery["restored_by"], min(waits), max(waits), texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, default=ROOT / "assets" / "nano-llama", help="(%(default)s)")
    parser.add_argument("--quantize", help="what blocks and head are held in")
    parser.add_argument("--setting", action="append", help=f"may be repeated (default: {' '.join(SETTINGS)})")
    parser.add_argument("--repeat", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--replay-bytes", type=int, default=256 << 20, help="rows that a node keeps (%(default)s)")
    add_json_flag(parser, "restoring")
    args = parser.parse_args()
    logging.getLogger("mdi").setLevel(logging.ERROR)
    rows = []
    with contextlib.ExitStack() as stack:
        nodes = secondaries(args.ckpt, stack)
        for name in args.setting or SETTINGS:
            rows += measure(args, nodes, Setting.of(name))
    lines = [line for name in dict.fromkeys(row.setting for row in rows) for line in compare(rows, name)]
    for line in lines:
        print("{setting:18} node {lost}: {what:5} replay {replay:.3f} s, tokens {tokens:.3f} s; {chosen} is chosen and takes "
              "{worse:.2f} of the shorter; same texts: {is_same}".format(**line))  # fmt: skip
    save(args.json, {"model": args.ckpt.name, "quantize": args.quantize, "repeat": args.repeat, "lines": lines,
                     "rows": [{**asdict(row), "texts": None} for row in rows]})  # fmt: skip


def compare(rows: list[Row], setting: str) -> list[dict[str, Any]]:
    """Medians of both ways; the one that a run with memory for rows chooses."""
    lines = []
    for lost in sorted({row.lost for row in rows}):
        own = [row for row in rows if (row.setting, row.lost) == (setting, lost)]
        chosen = next(row.restored_by for row in own if row.wanted == "replay")
        is_same = all(row.texts == own[0].texts for row in own)
        for what in ("first", "all"):
            times = {}
            for way in RESTORED:
                found = [getattr(row, f"{what}_s") for row in own if row.restored_by == way]
                times[way] = statistics.median(found) if found else float("inf")
            worse = times[chosen] / min(times.values())
            lines.append({"setting": setting, "lost": lost, "what": what, **times, "chosen": chosen, "worse": worse,
                          "is_same": is_same})  # fmt: skip
    return lines


if __name__ == "__main__":
    main()
