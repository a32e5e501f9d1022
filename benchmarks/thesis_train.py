"""The thesis' smallest NanoGPT, trained by old/nanoGPT/train.py on lines of a seeded grammar, within minutes.

The text has 65 characters, as many as Tiny Shakespeare, so that the model has the thesis' number of parameters to the digit;
and what it leaves to chance is known, so that a loss can be judged.
"""

from __future__ import annotations

import csv
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from string import Formatter
from typing import Any

import on_path

NANO = on_path.ROOT / "old" / "nanoGPT"
KEY = "nanogpt-7"
BATCH, CONTEXT, N_THREADS = 4, 128, 2
FULL_STEPS, QUICK_STEPS = 700, 4  # about four minutes on two cores; some seconds
_WORDS = {
    "name": "Anna|Ben|Clara|David|Emma|Felix|Greta|Hugo|Ida|Jonas|Klara|Leo|Mia|Noah|Olga|Paul|Quinn|Rosa|Sam|Tina|Ugo|Vera|"
    "Willy|Xenia|Yara|Zoe",
    "verb": "finds|paints|sells|hides|mends|carries|wants|breaks",
    "kind": "old|young|tall|quiet|brave|lazy|gentle|proud",
    "thing": "apple|book|candle|drum|flute|garden|hammer|jug|kite|lamp|mirror|quilt|rope|violin|box",
    "place": "in the house|near the river|on the hill|at the market|behind the church|under the bridge",
}
WORDS = {kind: words.split("|") for kind, words in _WORDS.items()}
LINES = (
    "{name} {verb} the {kind} {thing} {place}.\n",
    "The {kind} {thing} is {place}, and {name} {verb} it.\n",
    '"Who {verb} my {thing}?" asks {name}; "I do!" says {name}.\n',
    "{name}'s {thing}: {kind}, {kind} (and {place}).\n",
    "Well-known {name} {verb} no {thing} {place}!\n",
)
N_LINES = 20_000  # a million characters


def grammar_text(n_lines: int = N_LINES, seed: int = 1) -> str:
    """So many lines; the same on every machine."""
    chance = random.Random(seed)
    return "".join(_line(chance) for _ in range(n_lines))


def _line(chance: random.Random) -> str:
    parts = []
    for literal, kind, _, _ in Formatter().parse(chance.choice(LINES)):
        parts.append(literal)
        if kind is not None:
            parts.append(chance.choice(WORDS[kind]))
    return "".join(parts)


def entropy() -> float:
    """What each character leaves to chance on average, in nats: no model of whole lines can have a smaller loss."""
    nats, n_characters = math.log(len(LINES)), 0.0
    for line in LINES:
        for literal, kind, _, _ in Formatter().parse(line):
            n_characters += len(literal) / len(LINES)
            if kind is not None:
                nats += math.log(len(WORDS[kind])) / len(LINES)
                n_characters += sum(map(len, WORDS[kind])) / len(WORDS[kind]) / len(LINES)
    return nats / n_characters


def trained_checkpoint(folder: Path, n_steps: int) -> Path:
    """The trained model's checkpoint; made once for a number of steps, and kept.

    Raises:
        subprocess.CalledProcessError: a program failed, and has said why.
    """
    where = folder / f"{KEY}-trained-{n_steps}"
    if not (where / "train_state.pth").is_file() or _losses(where)[-1]["step"] != str(n_steps):
        data, text = folder / "grammar", folder / "grammar.txt"
        folder.mkdir(parents=True, exist_ok=True)
        text.write_text(grammar_text(), encoding="utf-8")
        _call("prepare_data.py", text, "--out", data)
        _call(
            "train.py", "--blocks", 7, "--dropout", 0, "--ckpt", where, "--dataset", data, "--overwrite",
            "--max-iters", n_steps, "--batch-size", BATCH, "--grad-acc-steps", 1, "--lr", "5e-4",
            "--warmup-iters", n_steps // 10, "--ckpt-interval", max(4, n_steps // 4), "--eval-iters", min(25, n_steps),
            "--log-interval", max(1, n_steps // 20), "--device", "cpu", "--threads", N_THREADS,
        )  # fmt: skip
    return where


def training_result(where: Path) -> dict[str, Any]:
    """What the run's losses.csv says: steps, characters seen, held-out losses (nats per character)."""
    rows = _losses(where)
    n_steps = int(rows[-1]["step"])
    return {
        "steps": n_steps,
        "characters": n_steps * BATCH * CONTEXT,
        "entropy": entropy(),
        "losses": [[int(row["step"]), float(row["val_loss"])] for row in rows if row["val_loss"]],
    }


def _losses(where: Path) -> list[dict[str, str]]:
    with open(where / "losses.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _call(program: str, *arguments: object) -> None:
    """Run one of old/nanoGPT/, which prints its progress, with torch's choice of threads. Raises CalledProcessError."""
    # Threads that wait actively take the core from the one they wait for, if another program needs a core as well.
    env = {**os.environ, "OMP_NUM_THREADS": str(N_THREADS), "OMP_WAIT_POLICY": "PASSIVE"}
    begin = time.monotonic()
    subprocess.run([sys.executable, str(NANO / program), *map(str, arguments)], check=True, env=env)
    print(f"{program}: {time.monotonic() - begin:.0f} s", flush=True)
