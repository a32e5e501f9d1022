"""Texts on a terminal and elsewhere: nothing is lost, nothing is mixed up, and nothing of a model moves the cursor."""

from __future__ import annotations

import io
import os
import re

import pytest

from mdi.cli.output import Flow, Panels, open_stream, paint
from mdi.columns import width, wrapped


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "24")
    return Terminal()


def shown(n_samples: int, *pieces: tuple[int, str], out: io.StringIO | None = None) -> str:
    out = out if out is not None else io.StringIO()
    stream = open_stream(n_samples, out)
    for index, text in pieces:
        stream.show(index, text)
    return out.getvalue()


def screen(written: str) -> list[str]:
    """What a terminal shows after all this was written: a terminal that knows what Panels uses, and nothing else."""
    rows, at = [""], 0
    for token in re.findall(r"\033\[\d*[A-Za-z]|\r|\n|[^\033\r\n]+", written):
        if token == "\n":
            at += 1
            rows += [""] * (at + 1 - len(rows))
        elif token == "\r":
            pass  # each line is written from its beginning
        elif token.endswith("A") and token.startswith("\033["):
            at -= int(token[2:-1])
            assert at >= 0, "above what it has drawn"
        elif token == "\033[K":
            pass
        elif token == "\033[J":
            del rows[at + 1 :]
            rows[at] = ""
        elif not token.startswith("\033["):
            rows[at] = token
    return rows


def test_one_sample_flows() -> None:
    assert shown(1, (0, "Who"), (0, " are\nyou"), (0, "")) == "Who are\nyou\n"


def test_a_file_gets_one_text_after_the_other() -> None:
    pieces = [(0, "one\ntw"), (1, "eins\n\nz"), (2, "un"), (0, "o"), (2, ""), (0, ""), (1, "wei\n"), (1, "")]
    assert shown(3, *pieces) == "--- sample 0\none\ntwo\n--- sample 1\neins\n\nzwei\n\n--- sample 2\nun\n"


def test_the_first_text_is_not_held_back() -> None:
    assert shown(2, (1, "later"), (0, "now")) == "--- sample 0\nnow"


def test_on_a_terminal_all_texts_are_below_each_other(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdi.cli.output.REDRAW_S", 0.0)
    stream = open_stream(2, terminal)
    assert isinstance(stream, Panels)
    for index, text in [(0, "one"), (1, "eins"), (0, "\ntwo"), (1, " und\tmehr")]:
        stream.show(index, text)
    assert screen(terminal.getvalue()) == ["--- sample 0", "one", "two", "--- sample 1", "eins und    mehr", ""]
    for _ in range(30):
        stream.show(0, "\nline")
    growing = screen(terminal.getvalue())
    assert len(growing) <= 24 and growing[1:11] == ["line"] * 10 and growing[11] == "--- sample 1"
    stream.show(0, "")
    stream.show(1, "")
    whole = screen(terminal.getvalue())
    assert whole == ["--- sample 0", "one", "two", *["line"] * 30, "--- sample 1", "eins und    mehr", ""]


def test_each_text_has_its_colour(terminal: Terminal) -> None:
    written = shown(2, (0, "a"), (1, "b"), (0, ""), (1, ""), out=terminal)
    first, second = (re.findall(rf"\033\[(\d+)m{text}\033\[0m", written)[-1] for text in ("a", "b"))
    assert first != second
    assert f"\033[{first}m--- sample 0" in written and f"\033[{second}m--- sample 1" in written


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_refused(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    written = shown(2, (0, "a\n"), (1, "b\n"), (0, ""), (1, ""), out=terminal)
    assert not re.search(r"\033\[\d+m", written)
    assert ("\033" in written) == (name == "NO_COLOR"), "a dumb terminal gets no codes at all"


def test_a_file_gets_no_codes() -> None:
    assert "\033" not in shown(2, (0, "a\n"), (1, "b\n"), (0, ""), (1, ""))


@pytest.mark.parametrize("n_samples", [1, 2, 20])
def test_a_model_does_not_move_the_cursor(terminal: Terminal, n_samples: int) -> None:
    clean, dirty = "a[2Jbc", "a\033[2J\x07b\rc\x9b"
    other = Terminal()
    ends = [(i, "") for i in range(n_samples)]
    assert shown(n_samples, (0, dirty), *ends, out=terminal) == shown(n_samples, (0, clean), *ends, out=other)


def test_more_texts_than_lines_follow_each_other(terminal: Terminal) -> None:
    assert isinstance(open_stream(20, terminal), Flow)


@pytest.mark.parametrize("n_piece", [1, 7, 1000])
def test_long_lines_are_wrapped_at_spaces(terminal: Terminal, n_piece: int) -> None:
    columns = int(os.environ["COLUMNS"]) - 1
    text = " ".join(f"word{i}" for i in range(60)) + " " + "x" * (2 * columns + 5) + " " + "\u8a9e" * columns
    pieces = [(0, text[i : i + n_piece]) for i in range(0, len(text), n_piece)]
    lines = screen(shown(2, *pieces, (0, ""), (1, ""), out=terminal))
    lines = lines[1 : lines.index("--- sample 1")]
    assert max(map(width, lines)) <= columns and len(lines) >= 6
    assert "".join(lines).replace(" ", "") == text.replace(" ", ""), "nothing is lost"


def test_wrapping_ends_where_nothing_fits() -> None:
    assert wrapped("\u8a9e\u8a9e", 1) == ["\u8a9e", "\u8a9e"] and wrapped("", 5) == [""]


def test_paint_leaves_text_for_files_alone() -> None:
    assert paint("text", 1, io.StringIO()) == "text"
