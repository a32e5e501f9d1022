"""Records a node that is killed while a text grows, and draws the recording as assets/killed-node.svg.

    python benchmarks/recording.py            three machines (network namespaces, links of 20 ms one way); needs root and `ip`
    python benchmarks/recording.py --draw     only draws results/recording.json again

The model is SmolLM2-135M-Instruct, which `make real` fetches; --model takes another one.

Everything in the picture was printed by the commands, at the time at which it appears. The script ends with an error if the
text is not the one that a single machine writes.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import on_path

RAW = on_path.ROOT / "benchmarks" / "results" / "recording.json"
PICTURE = on_path.ROOT / "assets" / "killed-node.svg"
MODEL = Path("~/.cache/mdi-llm/real/models/SmolLM2-135M-Instruct.Q4_1.gguf").expanduser()
DELAY_S = 0.02
N_TOKENS = 130
KILL_AFTER = 250  # characters of the text
PROMPT = "Write a short story about a lighthouse keeper."
DEADLINE_S = 180.0  # without a word; the first start packs the weights
FLAGS = ("--prompt", PROMPT, "--n-tokens", str(N_TOKENS), "--temperature", "0", "--n-samples", "1", "--quantize", "own")

WIDTH, ROWS, LINE, CHAR, TOP = 100, 20, 19, 8.4, 76  # columns and rows of the terminal; pixels
LOSS = "is lost|listens on|the texts wait|blocks are now|ring restored"
SHORTEST_S = 0.04  # of a state that is drawn
HOLD_S = 4.0  # the last picture stays before it begins again


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "mdi.cli", *map(str, words)]


def record(model: Path) -> dict[str, Any]:
    """Run it; what the starter's terminal got, and when. Raises RuntimeError if something else happens than is to be shown."""
    from slow_hosts import SlowHosts

    flags = ("--ckpt", str(model), *FLAGS)

    with tempfile.TemporaryDirectory() as folder:
        own = {"PYTHONPATH": str(on_path.ROOT / "src"), "MDI_KEY_FILE": "", "COLUMNS": str(WIDTH), "TERM": "xterm"}
        environment = {**os.environ, **own, "XDG_CONFIG_HOME": f"{folder}/starter"}
        alone = subprocess.run(command("sample", *flags, "--json"), env=environment, capture_output=True, check=True)
        hosts = SlowHosts(3, DELAY_S)
        running: list[subprocess.Popen[bytes]] = []
        main, side = pty.openpty()
        try:

            def begin_on(host: int, words: Sequence[object], variables: dict[str, str], out: int, **more: Any) -> None:
                inside = ["ip", "netns", "exec", hosts.names[host], *command(*words)]
                running.append(subprocess.Popen(inside, env=variables, stdout=out, stderr=out, **more))

            words = (
                "starter",
                "--machines",
                3,
                "--addr",
                hosts.address(0),
                "--placement",
                "even",
                "--no-journal",
                *flags,
            )
            begin = time.monotonic()
            begin_on(0, words, environment, side, stdin=side)
            os.close(side)
            events, text, killed_s = [], "", None
            while True:
                if not select.select([main], [], [], DEADLINE_S)[0]:
                    logs = "".join(path.read_text() for path in Path(folder).glob("*.log"))
                    raise RuntimeError(f"nothing was printed for {DEADLINE_S:.0f} s; so far: {text}{logs}")
                try:
                    data = os.read(main, 65536).decode("utf-8", "replace")
                except OSError:
                    break  # the starter has ended
                if not data:
                    break
                events.append((round(time.monotonic() - begin, 3), data))
                text += data
                joining = re.search(r"machines: +mdi join (\S+) (\S+)", text)
                if joining is not None and len(running) == 1:
                    for i in (1, 2):
                        variables = {**environment, "XDG_CONFIG_HOME": f"{folder}/{i}"}
                        with open(f"{folder}/{i}.log", "wb") as log:
                            words = ("join", *joining.groups(), "--cache-dir", f"{folder}/cache{i}")
                            begin_on(i, words, variables, log.fileno())
                written = text.partition("\n" + PROMPT)[2]
                if killed_s is None and len(written) > KILL_AFTER:
                    running[1].send_signal(signal.SIGKILL)
                    killed_s = round(time.monotonic() - begin, 3)
        finally:
            os.close(main)
            for process in running:
                process.kill()
                process.wait()
            hosts.close()
    expected = json.loads(alone.stdout)["samples"][0]["text"]
    found = re.sub(r"\s+", "", text)
    if killed_s is None or re.sub(r"\s+", "", expected)[-60:] not in found or "lost" not in text:
        raise RuntimeError(f"the text is not that of one machine, or no node was lost:\n{text}")
    return {"delay_s": DELAY_S, "killed_s": killed_s, "events": events, "expected": expected}


def rows_of(text: str) -> list[str]:
    """The terminal's rows, wrapped."""
    rows: list[str] = []
    # Lines are wrapped at words, to be read; a terminal cuts them.
    for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n").split("\n"):
        line = line.rsplit("\r", 1)[-1]
        rows += textwrap.wrap(line, WIDTH, drop_whitespace=False) or [""]
    return rows


def states_of(events: list[tuple[float, str]], begin_s: float) -> list[tuple[float, list[str]]]:
    """Moments, in seconds from the beginning, and the rows that the terminal has from then on."""
    states: list[tuple[float, list[str]]] = []
    text = ""
    for at_s, data in events:
        text += data
        at_s = max(at_s - begin_s, 0.0)
        if states and at_s - states[-1][0] < SHORTEST_S:
            at_s = states.pop()[0]
        states.append((at_s, rows_of(text)[-ROWS:]))
    return states


def draw(recording: dict[str, Any]) -> str:
    """An animated SVG: every state of the terminal is a group that is visible for its time."""
    begin_s = next(at_s for at_s, data in recording["events"] if "ring is closed" in data) - 1.0
    states = states_of(recording["events"], begin_s)
    end_s, killed_s = states[-1][0] + HOLD_S, recording["killed_s"] - begin_s
    ends = [at_s for at_s, _ in states[1:]] + [end_s]
    width, height = round(WIDTH * CHAR + 32), TOP + ROWS * LINE + 18
    styles = [
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre;fill:#d6deeb}",
        "text.loss{fill:#ffb454}g,#dead{visibility:hidden}",
        _shown("dead", killed_s, end_s, end_s),
        *(_shown(f"f{i}", at_s, ends[i], end_s) for i, (at_s, _) in enumerate(states)),
        # Without motion, the last picture.
        "@media (prefers-reduced-motion:reduce){g{animation:none!important}"
        f"#f{len(states) - 1},#dead{{visibility:visible}}}}",
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        "<title>A node is killed in mid-sentence, and the sentence goes on</title>",
        *("<style>", *styles, "</style>"),
        f'<rect width="{width}" height="{height}" rx="10" fill="#011627"/>',
        *(_node(i, name, "#21513f") for i, name in enumerate(("starter", "10.77.0.2", "10.77.0.3"))),
        f'<g id="dead">{_node(1, "kill -9", "#8b2e2e")}</g>',
    ]
    for i, (_, rows) in enumerate(states):
        parts.append(f'<g id="f{i}">')
        for j, row in enumerate(rows):
            style = ' class="loss"' if re.search(LOSS, row) else ""
            parts += [f'<text x="16" y="{TOP + j * LINE + 14}"{style}>{escape(row)}</text>'] if row.strip() else []
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _node(place: int, name: str, color: str) -> str:
    x = 16 + place * 190
    return (
        f'<rect x="{x}" y="16" width="170" height="34" rx="6" fill="{color}"/>'
        f'<text x="{x + 85}" y="38" text-anchor="middle">{name}</text>'
    )


def _shown(name: str, first_s: float, last_s: float, end_s: float) -> str:
    """The style of an element that is visible from one moment to another, again and again."""
    first, last = 100 * first_s / end_s, 100 * last_s / end_s
    steps = ["0%{visibility:hidden}"] if first > 0 else []
    steps.append(f"{first:.3f}%{{visibility:visible}}")
    steps.append("100%{visibility:visible}" if last_s >= end_s else f"{last:.3f}%,100%{{visibility:hidden}}")
    return f"@keyframes {name}{{{''.join(steps)}}}#{name}{{animation:{name} {end_s:.2f}s step-end infinite}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the recording that there is")
    parser.add_argument("--model", type=Path, default=MODEL, help="the GGUF file or folder of the model")
    args = parser.parse_args()
    if not args.draw:
        from records import save

        save(RAW, record(args.model))
    PICTURE.write_text(draw(json.loads(RAW.read_text())))
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
