"""chat.py as a whole, in this process: questions come from a file, and whatever breaks ends it."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mdi.cli import INTERRUPTED, launch
from mdi.errors import UsageError
from mdi.run.texts import SampleReader
from mdi.run.trace import read_trace
from mdi.text.texts import TextCodec
from tiny_checkpoint import CONTEXT, reference, write_checkpoint

Chat = Callable[..., int]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("chat") / "tiny")


@pytest.fixture
def chat(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """A chat on one node with these lines typed; its exit status."""

    def run(typed: str | io.StringIO, *flags: str) -> int:
        monkeypatch.setattr("sys.stdin", typed if isinstance(typed, io.StringIO) else io.StringIO(typed))
        fixed = ["--ckpt", str(checkpoint), "--device", "cpu", "--prompt-style", "none", "--temperature", "0"]
        return launch("chat", [*fixed, "--n-tokens", "6", *flags])

    return run


def test_each_line_is_answered(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat("The ring\nThe ring\n/new\nThe ring\n") == 0
    replies = [part.strip() for part in capsys.readouterr().out.split("Model: ")[1:]]
    assert len(replies) == 3 and all(reply.startswith("The ring") for reply in replies), "the text that is continued"
    assert replies[0] == replies[2], "what was forgotten changes nothing"


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_answer_to_one_question_can_be_interrupted(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, reads = SampleReader.read, []

    def interrupted(self: SampleReader) -> None:
        reads.append(1)
        if len(reads) == 1:
            raise KeyboardInterrupt
        read(self)

    monkeypatch.setattr(SampleReader, "read", interrupted)
    assert launch("run", [str(checkpoint), "The ring", "--device", "cpu"]) == INTERRUPTED
    assert capsys.readouterr().out.startswith("The ring") and len(reads) == 2


def test_it_greets_a_person_and_knows_its_commands(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(Keyboard("/help\nThe ring\n/new\n/helpp\n/quit\nThe ring\n")) == 0
    shown = capsys.readouterr()
    assert "loading " in shown.err.splitlines()[0], "before the seconds in which nothing else is on the screen"
    assert "seed" not in shown.err, "a chat that is typed is not the same again"
    hello, *rest = shown.out.split("You: ")
    assert "tiny-random on this machine" in hello and "/help" in hello and "/quit" in hello
    assert [("Model: " in part) for part in rest] == [False, True, False, False, False], (
        "no command is said to the model"
    )
    assert all(
        word in rest[0] and word in rest[3]
        for word in ("/new", "/system", "/save", "/load", "/help", "/quit", "Ctrl-C")
    )
    assert "forgotten" in rest[2]


def test_a_text_is_continued_as_it_was_typed(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No line break behind it; and what a model adds is seen behind what it was given."""
    fixed = ["--device", "cpu", "--dtype", "float32", "--temperature", "0", "--n-tokens", "6"]
    assert launch("run", [str(checkpoint), "The ring is", *fixed]) == 0
    codec = TextCodec.from_checkpoint(checkpoint, "none")
    assert capsys.readouterr().out == "The ring is" + codec.decode(reference("The ring is", 6), continues=True) + "\n"


def test_a_chat_with_a_model_that_continues_is_one_text(checkpoint: Path) -> None:
    codec = TextCodec.from_checkpoint(checkpoint, "none")
    assert codec.encode_chat([], "Who are") == codec.encode("Who are")
    history = [("Who are", " you?"), ("Where", " is it?")]
    assert codec.encode_chat(history, "The ring") == codec.encode("Who are you?\nWhere is it?\nThe ring")


def test_a_text_that_is_too_long_fails_and_names_the_model_s_limit(
    chat: Chat, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "x" * 5000
    assert launch("run", [str(checkpoint), long, "--device", "cpu"]) == 1
    shown = capsys.readouterr()
    assert not shown.out and shown.err.count("error: ") == 1
    assert f"has 5000 tokens, and a text may have {CONTEXT} here: shorten it" in shown.err
    assert chat(f"{long}\nThe ring\n", "--sequence-length", "40") == 1, "a program that asks"
    shown = capsys.readouterr()
    assert shown.out.count("Model: ") == 1, "the next one is answered"
    assert f"may have 40 here: --sequence-length N allows more, up to the model's {CONTEXT}" in shown.err
    assert chat(Keyboard(f"{long}\n/quit\n")) == 0, "a person can type another one"


def test_what_the_nodes_did_is_written_down(chat: Chat, tmp_path: Path) -> None:
    assert chat("The ring\n", "--trace", str(tmp_path / "trace.json")) == 0
    assert read_trace(tmp_path / "trace.json").nodes


def test_a_program_gets_no_greeting(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat("/etc/hosts what is that?\n") == 0
    assert capsys.readouterr().out.startswith("Model: ")


def test_an_engine_that_fails_ends_the_chat(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sample(*_: object) -> list[int]:
        raise RuntimeError("no more memory")

    monkeypatch.setattr("mdi.engine.starter.sample", sample)
    assert chat("The ring\nThe ring\n") == 1
    assert "starter failed: RuntimeError: no more memory" in capsys.readouterr().err


def test_an_output_that_is_gone_ends_the_chat(chat: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As `chat.py | head -1`: nobody waits for an answer that cannot be shown."""
    with open(tmp_path / "out", "w") as file:

        class Closed(io.StringIO):
            def fileno(self) -> int:
                return file.fileno()

            def write(self, text: str) -> int:
                if "Model" in self.getvalue():
                    raise BrokenPipeError
                return super().write(text)

        monkeypatch.setattr("sys.stdout", Closed())
        assert chat("The ring\nThe ring\n") != 0


def test_an_answer_can_be_interrupted(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mdi.run.texts import SampleReader

    read = SampleReader.read
    n_reads = 0

    def interrupted(self: SampleReader) -> None:
        nonlocal n_reads
        n_reads += 1
        if n_reads == 1:
            raise KeyboardInterrupt
        read(self)

    monkeypatch.setattr(SampleReader, "read", interrupted)
    assert chat("The ring\nThe ring\n") == 0
    assert n_reads == 3 and capsys.readouterr().out.count("Model: ") == 2


def test_a_message_of_several_lines(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat('"""The\nring\n"""\n/new\n"""The ring"""\n/new\nThe ring\n"""The\n') == 0
    first, second, third, unended = (part.strip() for part in capsys.readouterr().out.split("Model: ")[1:])
    assert first.startswith("The\nring")
    assert second.splitlines()[0] == third.splitlines()[0], "the marks are no part of it"
    assert unended.startswith("The")


def test_a_chat_is_saved_and_goes_on(chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a chat.json"
    assert chat(f"The ring\nof\n/save {file}\na\n") == 0
    messages = json.loads(file.read_text(encoding="utf-8"))
    assert [one["role"] for one in messages] == ["user", "assistant"] * 2 and messages[2]["content"] == "of"
    third = capsys.readouterr().out.split("Model: ")[3]
    assert chat(f"/load {file}\na\n") == 0
    assert capsys.readouterr().out.split("Model: ")[1] == third, "with the same turns before it"


@pytest.mark.parametrize(
    "content",
    ["", "{}", '[{"role": "user", "content": "a"}]', '[{"role": "user", "content": 1}]', '["user"]', "[[]]", "\x00"],
)
def test_what_is_no_chat_is_not_loaded(
    content: str, chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.json"
    file.write_text(content, encoding="utf-8")
    assert (
        chat(f"The ring\n/load {file}\n/load {tmp_path}\n/load\n/save\n/save {tmp_path}/none/c\n/save {tmp_path}/c\n")
        == 1
    )
    assert len(json.loads((tmp_path / "c").read_text(encoding="utf-8"))) == 2, "what was said before is still there"
    errors = [line for line in capsys.readouterr().err.splitlines() if "ERROR" in line or line.startswith("error")]
    assert len(errors) == 5


def test_a_system_message_comes_first(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, check=lambda e: e.code == "value"):
        TextCodec.from_checkpoint(checkpoint, "none").encode_chat([], "The ring", "Be short.")
    folder = shutil.copytree(checkpoint, tmp_path / "with-a-template")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}")
    codec = TextCodec.from_checkpoint(folder, "auto")
    try:
        ids = codec.encode_chat([("a", "b")], "c", "Be short.")
    finally:
        codec.close()
    assert codec.decode(ids) == "system=Be short.;user=a;assistant=b;user=c;"


def test_what_the_model_is_told_can_be_changed(
    checkpoint: Path, chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "with-a-template")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    file = tmp_path / "c.json"
    flags = ("--ckpt", str(folder), "--prompt-style", "auto")
    assert chat(f"/system Be short.\n/system\nThe ring\n/new\n/save {file}\n", *flags) == 0
    shown = capsys.readouterr().out
    assert shown.count("The model is told: Be short.") == 2 and "/system stays" in shown
    assert json.loads(file.read_text(encoding="utf-8")) == [{"role": "system", "content": "Be short."}]
    assert chat("/system Be short.\nThe ring\n") == 1, "a model without a template has no place for it"
    assert capsys.readouterr().out.count("Model: ") == 1


def test_speed_is_shown_to_a_person(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(Keyboard("The ring\n")) == 0
    assert "(6 tokens, " in capsys.readouterr().out
    assert chat("The ring\n") == 0
    assert "tokens/s" not in capsys.readouterr().out
