"""chat.py as a whole, in this process: questions come from a file, and whatever breaks ends it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mdi.cli import launch
from mdi.model.stage import StarterStage
from tiny_checkpoint import write_checkpoint

Chat = Callable[..., int]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("chat") / "tiny")


@pytest.fixture
def chat(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """A chat on one node with these lines typed; its exit status."""

    def run(typed: str, *flags: str) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        fixed = ["--ckpt", str(checkpoint), "--device", "cpu", "--prompt-style", "none", "--temperature", "0"]
        return launch("chat", [*fixed, "--n-tokens", "6", *flags])

    return run


def test_each_line_is_answered(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat("The ring\nThe ring\n/new\nThe ring\n") == 0
    replies = [part.strip() for part in capsys.readouterr().out.split(">> Reply: ")[1:]]
    assert len(replies) == 3
    assert replies[0] == replies[2], "what was forgotten changes nothing"


def test_an_engine_that_fails_ends_the_chat(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def head(self: StarterStage, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(StarterStage, "head", head)
    assert chat("The ring\nThe ring\n") == 1
    assert "starter failed: RuntimeError: no more memory" in capsys.readouterr().err


def test_an_output_that_is_gone_ends_the_chat(chat: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As `chat.py | head -1`: nobody waits for an answer that cannot be shown."""
    with open(tmp_path / "out", "w") as file:

        class Closed(io.StringIO):
            def fileno(self) -> int:
                return file.fileno()

            def write(self, text: str) -> int:
                if "Reply" in self.getvalue():
                    raise BrokenPipeError
                return super().write(text)

        monkeypatch.setattr("sys.stdout", Closed())
        assert chat("The ring\nThe ring\n") != 0


def test_an_answer_can_be_interrupted(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mdi.node.sample import SampleReader

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
    assert n_reads == 3 and capsys.readouterr().out.count(">> Reply: ") == 2
