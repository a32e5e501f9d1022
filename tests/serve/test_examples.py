"""The programs of examples/ against a server of the embedded model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from conftest import KEYS, Server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, server: Server, *arguments: str) -> list[str]:
    command = [sys.executable, str(EXAMPLES / name), "--server", f"http://127.0.0.1:{server.port}", *arguments]
    env = {**os.environ, "MDI_API_KEY": KEYS[0]}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_many_files_are_summarized_in_their_order(server: Server, tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.txt" for i in range(5)]
    for i, file in enumerate(files):
        file.write_text(f"ROMEO: {i} of the stars\n" * 5)
    lines = run("summarize.py", server, "--max-tokens", "8", *map(str, files))
    named = [line.partition(": ")[0] for line in lines if line.startswith(str(tmp_path))]
    assert named == list(map(str, files))


def test_an_agent_calls_its_tool_and_answers(server: Server) -> None:
    lines = run(
        "agent.py", server, "--first-tool", "calculate", "--steps", "2", "--max-tokens", "120", "What is 2 + 3?"
    )
    assert lines[0].startswith("calculate({") and lines[0].rpartition(" = ")[2].lstrip("-").isdigit()
    assert len(lines) > 1, "the answer after the tool's result"


def test_a_bot_answers_in_each_room(server: Server) -> None:
    lines = run("bot.py", server, "--max-tokens", "8")
    answered = [line.partition("]")[0] for line in lines if "] bot: " in line]
    assert answered == ["[garden", "[street", "[garden"]


def test_there_is_no_key_in_a_file() -> None:
    for path in EXAMPLES.iterdir():
        if path.is_file():
            assert not any(mark in path.read_text(encoding="utf-8") for mark in ("sk-", "hf_", "Bearer ey"))
