"""What others wrote cannot speak to the terminal, whichever way it leaves: texts, errors, log lines."""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mdi.cli import chat as cli_chat
from mdi.cli import launch
from mdi.cli import output as cli_output
from mdi.cli.output import Flow
from mdi.errors import ControlError
from mdi.metrics import RunMetrics, SampleMetrics
from mdi.spec.options import Options
from mdi.terminal import TerminalHandler, note_written, one_line, plain, reporting, show
from mdi.text.answers.forms import WORDS
from waiting import until

HOSTILE = "before \x1b]0;owned\x07\x1b[31m\x9b2J\x08after\n\tnext"
HARMLESS = "before ]0;owned[31m2Jafter\n\tnext"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Takes the place of stdout; not a fixture, because pytest sets its own again before the test."""
    out = Screen()
    monkeypatch.setattr(sys, "stdout", out)
    return out


def test_texts_and_lines() -> None:
    assert plain(HOSTILE) == HARMLESS
    assert plain("caf\u00e9 \u4f60\u597d \U0001f600\r\n") == "caf\u00e9 \u4f60\u597d \U0001f600\n"
    assert one_line("a\x1b[0m\nb\u202ec\udc80") == "a [0m b c "


def test_a_program_gets_the_text_as_it_is() -> None:
    pipe, terminal = io.StringIO(), Screen()
    show(HOSTILE, out=pipe)
    show(HOSTILE, out=terminal)
    assert (pipe.getvalue(), terminal.getvalue()) == (HOSTILE + "\n", HARMLESS + "\n")


def test_an_answer_in_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watched(monkeypatch)

    def submit(question: str, ids: list[int], params: Any, stop: list[str], on_text: Any, adapter: str) -> Any:
        on_text(HOSTILE)
        on_text("")
        return SimpleNamespace(text=HOSTILE, token_times_s=[])

    codec = SimpleNamespace(
        encode_chat=lambda history, question, system: [1], form=WORDS, prompt_style=object()
    )  # fmt: skip
    model = SimpleNamespace(codec=codec, check_prompt=lambda ids: None, weights=SimpleNamespace(adapters=()))
    session = SimpleNamespace(model=model, max_length=100, submit=submit, read=lambda: None, adapters=())
    reply = cli_chat.answer(session, cli_chat.Chat(), "Who?", SimpleNamespace(n_tokens=10), [])  # type: ignore[arg-type]
    assert reply.text == HOSTILE, "what the model said goes back to the model"
    assert HARMLESS in screen.getvalue()
    assert not set(screen.getvalue()) & set("\x1b\x07\x9b\x08")


@pytest.mark.parametrize("failure", [None, ControlError("lost")])
def test_texts_that_are_shown_when_they_are_complete(
    monkeypatch: pytest.MonkeyPatch, failure: ControlError | None
) -> None:
    screen = watched(monkeypatch)
    sample = SampleMetrics.from_times(HOSTILE, HOSTILE, [1], [1], "length", [0.1])
    metrics = RunMetrics.from_parts(HOSTILE, [sample], [], 1.0)
    model = SimpleNamespace(context_length=10, spec=SimpleNamespace(max_length=10))
    node = SimpleNamespace(metrics=lambda: metrics, trace=lambda: None, model=model)
    args = Options(seed=1)
    cli_output.report(args, node, failure, False)  # type: ignore[arg-type]
    assert "owned" in screen.getvalue() and not set(screen.getvalue()) & set("\x1b\x07\x9b\x08")


def test_json_is_harmless_and_still_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watched(monkeypatch)
    cli_output.print_json({"text": HOSTILE})
    assert json.loads(screen.getvalue()) == {"text": HOSTILE}
    assert screen.getvalue().strip().isprintable()


def test_errors_and_log_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What a peer answers, how it calls its version, what a stranger names the fields of its config: all end up here."""

    def run(args: argparse.Namespace) -> int:
        logging.getLogger("mdi").warning("secondary0: %s", HOSTILE)
        logging.getLogger("mdi").info(HOSTILE)
        raise ControlError(f"secondary0 at 127.0.0.1:1: {HOSTILE}")

    module = ModuleType("hostile_command")
    module.add_arguments = lambda parser: None  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hostile_command", module)
    assert launch("hostile", [], module_name="hostile_command") == 1
    said = capsys.readouterr().err
    assert said.count("owned") == 3 and all(line.isprintable() for line in said.splitlines())
    assert len(said.splitlines()) == 3, "nobody writes a line of its own"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_of_the_log_begins_on_a_line_of_its_own() -> None:
    out = Terminal()
    handler = TerminalHandler(out)
    stream = Flow(1, out)
    for piece in ("In mid", "-sentence"):
        stream.show(0, piece)
    handler.emit(logging.makeLogRecord({"msg": "lost"}))
    handler.emit(logging.makeLogRecord({"msg": "restored"}))
    stream.show(0, " and on\n")
    handler.emit(logging.makeLogRecord({"msg": "done"}))
    stream.show(0, "")
    assert out.getvalue() == "In mid-sentence\nlost\nrestored\n and on\ndone\n\n"


def test_what_a_program_reads_gets_no_line_ends(capsys: pytest.CaptureFixture[str]) -> None:
    out, log = io.StringIO(), io.StringIO()
    Flow(1, out).show(0, "In mid")
    TerminalHandler(log).emit(logging.makeLogRecord({"msg": "lost"}))
    assert (out.getvalue(), log.getvalue()) == ("In mid", "lost\n")


def test_what_takes_long_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    done = 0
    with caplog.at_level(logging.INFO, "mdi"), reporting(lambda: f"{done} of 2", first_s=0.01, each_s=0.01):
        for done in (1, 2):
            until(lambda: any(f"{done} of 2" in record.message for record in caplog.records))  # noqa: B023
    assert "0 of 2" not in caplog.records[-1].message
    with caplog.at_level(logging.INFO, "mdi"):
        caplog.clear()
        with reporting(lambda: "short", first_s=60):
            pass
    assert not caplog.records


def test_a_wait_is_one_line_that_changes_in_its_place() -> None:
    """On a terminal; a line of the log comes in its place, and at the end nothing of it is left."""
    screen, logger = Screen(), logging.getLogger("mdi")
    handler = TerminalHandler(screen)
    logger.addHandler(handler)
    step = "first"
    try:
        with reporting(lambda: f"{step}\x1b[2J", first_s=0.01, each_s=0.01):
            until(lambda: "first [2J (0 s so far)" in screen.getvalue())
            step = "second"
            until(lambda: "second" in screen.getvalue())
            logger.error("a line")
            after = len(screen.getvalue())
            until(lambda: "second" in screen.getvalue()[after:])
    finally:
        logger.removeHandler(handler)
    shown = screen.getvalue()
    assert shown.startswith("\rfirst") and shown.count("\n") == 1
    assert "\r\x1b[Ka line\n" in shown
    assert shown.endswith("\r\x1b[K")


def test_a_wait_is_not_written_over_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, logger = watched(monkeypatch), logging.getLogger("mdi")
    handler = TerminalHandler(screen)
    logger.addHandler(handler)
    n_asked = 0

    def state() -> str:
        nonlocal n_asked
        n_asked += 1
        return "loading"

    try:
        screen.write("half a line")
        note_written("half a line", screen)
        with reporting(state, first_s=0.01, each_s=0.01):
            until(lambda: n_asked > 2)
    finally:
        note_written("\n", screen)
        logger.removeHandler(handler)
    assert screen.getvalue() == "half a line"
