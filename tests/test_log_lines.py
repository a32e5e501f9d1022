"""Log lines: plain, with time and level, or JSON."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path

import pytest

from mdi.cli import launch
from mdi.terminal import FORMS, JSON, PLAIN, TIMED, VARIABLE, form_of, formatter


def record(message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    found = (type(error), error, None) if error is not None else None
    return logging.LogRecord("mdi", logging.WARNING, "x.py", 1, message, args, found)


@pytest.mark.parametrize(
    ("command", "is_json", "variable", "form"),
    [
        ("starter", False, None, PLAIN),
        ("secondary", False, None, TIMED),
        ("serve", False, None, TIMED),
        ("secondary", False, "plain", PLAIN),
        ("starter", False, "json", JSON),
        ("secondary", True, "plain", JSON),
        ("starter", False, "nonsense", PLAIN),
    ],
)
def test_who_chooses_the_form(command: str, is_json: bool, variable: str | None, form: str) -> None:
    assert form_of(command, is_json, {} if variable is None else {VARIABLE: variable}) == form


def test_a_json_line_is_one_object() -> None:
    line = formatter(JSON).format(record("%s is lost\n\x1b[2J", "secondary0", error=ValueError("gone")))
    assert "\n" not in line and "\x1b" not in line
    found = json.loads(line)
    assert found["level"] == "warning" and found["message"].startswith("secondary0 is lost")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found["time"]) and "gone" in found["error"]


def test_a_services_line_has_time_and_level() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d WARNING it ran", formatter(TIMED).format(record("it ran")))
    assert formatter(PLAIN).format(record("it ran")) == "it ran"


@pytest.mark.parametrize("form", FORMS)
def test_no_form_lets_a_control_character_through(form: str) -> None:
    assert "\x9b" not in formatter(form).format(record("a\x9b31mb\rc"))


def test_children_get_the_form_of_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the environment while a command runs, and gone with it."""
    import mdi.cli.explain as command

    seen: list[str | None] = []
    monkeypatch.setattr(command, "run", lambda args: seen.append(os.environ.get(VARIABLE)) or 0)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    assert launch("explain", ["file"]) == 0
    assert launch("explain", ["file", "--log-json"]) == 0
    assert seen == [PLAIN, JSON] and VARIABLE not in os.environ


def test_a_failure_is_an_object_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert launch("explain", [str(tmp_path / "none"), "--log-json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert found["level"] == "error" and str(tmp_path) in found["message"]
