"""Every command's `--help`, and its refusal of wrong calls, stay as they are.

    REWRITE=1 python -m pytest tests/cli/test_commands.py

writes the help of each command (help/) and the outcome of each wrong call (wrong_calls.tsv) again; read the difference before
it is committed.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
from pathlib import Path

import pytest

from mdi import cli
from mdi.cli import COMMANDS, GROUPS, launch
from mdi.errors import MdiError
from mdi.net.keys import new_secret, write_keys
from mdi.placement.profile import boards
from mdi.run.local import free_ports
from tiny_checkpoint import write_checkpoint

HERE = Path(__file__).parent
SRC = Path(cli.__file__).resolve().parents[2]
COLUMNS = "400"  # an option stands on a line of its own, however long the path of the checkout is
TABLE = HERE / "wrong_calls.tsv"  # call; exit status, error's class or "parser", its code; the option that it names
IS_REWRITING = bool(os.environ.get("REWRITE"))


def first_of(command: str) -> tuple[str, ...]:
    """The options that --help shows; empty: all."""
    return getattr(importlib.import_module(COMMANDS[command][0]), "FIRST", ())


def help_of(command: str, capture: pytest.CaptureFixture[str], flag: str = "--help") -> str:
    with pytest.raises(SystemExit) as end:
        launch(command, [flag], prog=f"mdi {command}")
    assert end.value.code == 0
    text = capture.readouterr().out.replace(str(SRC), "SRC")
    return re.sub(r"\nusage: .*?\n\n", "\n", "\n" + text, count=1, flags=re.DOTALL).lstrip("\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_stays(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", COLUMNS)
    found = help_of(command, capsys, "--help-all" if first_of(command) else "--help")
    path = HERE / "help" / f"{command}.txt"
    if IS_REWRITING:
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_few_options(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many: those that are named, examples, and how all are shown."""
    monkeypatch.setenv("COLUMNS", COLUMNS)
    text = help_of(command, capsys)
    shown = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE))
    first = first_of(command)
    if first:
        assert shown == {*first, "--help-all"} and len(first) <= 13 and "example" in text
        every = help_of(command, capsys, "--help-all")
        assert len(re.findall(r"^  (?:-\w+, )?--", every, re.MULTILINE)) > 2 * len(first)
    assert len(shown) <= 26


@pytest.mark.parametrize("command", [command for command in COMMANDS if first_of(command)])
def test_help_explains_an_option_in_few_lines(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = re.split(r"^  (?=-)", help_of(command, capsys).split("\n\n", 2)[2], flags=re.MULTILINE)[1:]
    assert len(options) == len(first_of(command)) + 1
    assert [text for text in options if len(re.findall(r"^ {4,}\S", text, re.MULTILINE)) > 5] == []


def test_a_long_help_is_that_of_all_options(capsys: pytest.CaptureFixture[str]) -> None:
    brief, whole = (help_of("run", capsys, flag) for flag in ("--help", "--help-all"))
    assert "--quantize FORMAT" in brief and "perplexity" not in brief and "perplexity" in whole


def test_each_command_is_in_one_group() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)


def outcome(call: str, places: dict[str, Path], capture: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Exit status, the error's class and its code, of a command line that must fail, and what it printed.

    Returns:
        "2 UsageError usage", the text of the error.
    """
    errors: list[MdiError | str] = []
    command, *flags = [str(places.get(word, word)) for word in shlex.split(call)]
    capture.readouterr()
    try:
        status = launch(command, flags, prog=f"mdi {command}", show=errors.append)
    except SystemExit as end:
        return f"{end.code} parser -", capture.readouterr().err
    error = errors[0] if errors else f"{call!r} is valid"
    assert isinstance(error, MdiError), error
    return f"{status} {type(error).__name__} {error.code}", str(error)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files that the calls of the table name."""
    folder = tmp_path_factory.mktemp("calls")
    ports = iter(free_ports(8))
    files = {name: folder / f"{name.lower()}.json" for name in ("NODES", "OPEN", "PROFILES", "KEY", "NONE")}
    for name, addr in (("NODES", "127.0.0.1"), ("OPEN", "0.0.0.0")):
        entries = [
            {"addr": addr, "communication": {"port": next(ports)}, "inference": {"port_in": next(ports)}}
            for _ in range(2)
        ]
        files[name].write_text(json.dumps({"nodes": {"starter": entries[0], "secondary": entries[1:]}}))
    files["PROFILES"].write_text(json.dumps(boards().to_json()))
    write_keys(files["KEY"], (new_secret(),))
    return {**files, "CKPT": write_checkpoint(folder / "tiny")}


def named_option(call: str, text: str) -> str:
    """The first of the call's options that an error names."""
    found = [word for word in re.findall(r"--?[a-z][a-z-]*", text) if re.search(rf"(^| ){word}\b", call)]
    return found[0] if found else ""


@pytest.mark.slow
def test_wrong_calls_are_refused_as_before(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MDI_STORE", str(tmp_path))  # where no other test has used a model last
    rows = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()]
    found = []
    for call, *_ in rows:
        what, text = outcome(call, places, capsys)
        found.append([call, what, named_option(call, text)])
        if IS_REWRITING:
            print(found[-1], text)
    if IS_REWRITING:
        TABLE.write_text("".join("\t".join(row) + "\n" for row in found), encoding="utf-8")
    assert found == (found if IS_REWRITING else rows)
