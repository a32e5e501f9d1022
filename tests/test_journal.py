"""The journal of a run: what was written is read again, damage at its end is cut off, and a full disk ends nothing."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from mdi.cli import launch
from mdi.errors import UsageError
from mdi.run import journal as journal_module
from mdi.run.journal import (
    KEPT_S,
    N_KEPT,
    Journal,
    JournalText,
    RunRecord,
    describe_runs,
    find_run,
    is_locked,
    new_run,
    read_record,
    remove_run,
    runs_in,
)

DEADLINE_S = 60.0


def record() -> RunRecord:
    flags = {"n_tokens": 40, "ckpt": {"path": "/models/tiny"}}
    return RunRecord(flags, "a" * 64, [JournalText("Who?", [1, 2]), JournalText("Ä\n", [3])])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one" / "journal"


def written(path: Path) -> Path:
    journal = Journal.new(path, record())
    journal.add(0, [10, 11], None)
    journal.add(1, [20], None)
    journal.add(0, [12], "length")
    journal.close()
    journal.close()
    return path


def test_what_was_written_is_read(path: Path) -> None:
    found = read_record(written(path))
    assert (found.flags, found.identity) == (record().flags, "a" * 64)
    assert found.texts == [JournalText("Who?", [1, 2], [10, 11, 12], "length"), JournalText("Ä\n", [3], [20])]
    assert not found.has_ended and found.n_bytes == path.stat().st_size


def test_a_text_that_begins_anew_keeps_only_what_is_told_then(path: Path) -> None:
    """Its tokens were written before, or are only to be written."""
    for is_written in (False, True):
        if is_written:
            journal, _ = Journal.reopen(written(path))
        else:
            journal = Journal.new(path.with_name("other"), record())
        journal.add(1, [21, 22], None)
        journal.add(1, [20, 23], None, is_anew=True)
        journal.add(1, [24], "length")
        journal.close()
        assert read_record(journal.path).texts[1] == JournalText("Ä\n", [3], [20, 23, 24], "length")


def test_only_the_user_can_read_it(path: Path) -> None:
    written(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def prompts_end(data: bytes) -> int:
    """Where the tokens begin: behind the header and the two prompts."""
    return sum(map(len, data.splitlines(keepends=True)[:3]))


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def test_every_damaged_end_is_cut_off(path: Path) -> None:
    """Wherever the file ends behind its prompts, or a byte of its last line is another: what comes before it is read, and the
    run goes on from there."""
    data = written(path).read_bytes()
    for n_bytes in range(prompts_end(data), len(data)):
        path.write_bytes(data[:n_bytes])
        journal, found = Journal.reopen(path)
        assert found.n_bytes == data[:n_bytes].rfind(b"\n") + 1 == path.stat().st_size
        assert len(found.texts) == 2 and not found.has_ended
        journal.close()
    for place in range(data[:-1].rindex(b"\n") + 1, len(data)):
        path.write_bytes(flipped(data, place))
        found = read_record(path)
        assert found.n_bytes == data[:place].rfind(b"\n") + 1
    assert data.count(b"\n") == 5


def test_without_all_its_prompts_it_is_refused_and_left_alone(path: Path) -> None:
    data = written(path).read_bytes()
    header, first, second, *tokens = data.splitlines(keepends=True)
    other = Journal.new(path.parent.parent / "two" / "journal", RunRecord({}, "", [JournalText("Why?", [4, 5])]))
    other.close()
    foreign = other.path.read_bytes().splitlines(keepends=True)[1]
    damaged = {
        "cut": [data[:n_bytes] for n_bytes in range(prompts_end(data))],
        "flipped": [flipped(data, place) for place in range(prompts_end(data))],
        "swapped": [b"".join([header, second, first, *tokens])],
        "another's": [b"".join([header, foreign, second, *tokens])],
        "one too many": [b"".join([header, first, second, second, *tokens])],
    }
    for how, journals in damaged.items():
        for content in journals:
            path.write_bytes(content)
            with pytest.raises(UsageError) as e:
                Journal.reopen(path)
            assert str(path) in str(e.value)
            assert path.read_bytes() == content and not is_locked(path), how


def test_damage_before_good_records_is_refused_and_left_alone(path: Path) -> None:
    """Both lines of text 0 or the one of text 1 are damaged, and others follow: no token may disappear, and nothing is cut off
    before the user says so."""
    data = written(path).read_bytes()
    last = data[:-1].rindex(b"\n") + 1
    for place in range(
        prompts_end(data), last - 1
    ):  # without its end, a line is one with the next: both are the damaged end
        path.write_bytes(flipped(data, place))
        with pytest.raises(UsageError) as e:
            Journal.reopen(path)
        assert "line 4" in str(e.value) and "truncate -s" in str(e.value)
        assert path.read_bytes() == flipped(data, place)
    os.truncate(path, prompts_end(data))  # as the message says
    journal, found = Journal.reopen(path)
    assert [text.ids for text in found.texts] == [[], []]
    journal.close()


def test_a_run_without_texts_is_not_over() -> None:
    assert not RunRecord({}, "").has_ended
    assert RunRecord({}, "", [JournalText("a", [1], [2], "eos")]).has_ended


def test_a_damaged_run_is_not_removed_by_trying_to_resume_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(new_run(tmp_path))
    content = flipped(path.read_bytes(), path.read_bytes().index(b"Who?"))
    path.write_bytes(content)
    assert launch("starter", ["--resume", "last", "--run-dir", str(tmp_path)]) == 2
    assert str(path) in capsys.readouterr().err and path.read_bytes() == content
    assert launch("starter", ["--resume", "--run-dir", str(tmp_path)]) == 0
    assert f"{path} is damaged" in capsys.readouterr().out


def test_a_run_goes_on_in_the_same_file(path: Path) -> None:
    with open(written(path), "ab") as file:
        file.write(b"0123 half a li")
    journal, found = Journal.reopen(path)
    assert found.texts[1].ids == [20]
    journal.add(1, [21], "eos")
    journal.close()
    found = read_record(path)
    assert found.texts[1] == JournalText("Ä\n", [3], [20, 21], "eos") and found.has_ended


def test_what_is_no_journal_is_refused(path: Path) -> None:
    with pytest.raises(UsageError):
        read_record(path)
    path.parent.mkdir(parents=True)
    for data in (b"", b"{}\n", b"00000000 {}\n", b"\0" * 100):
        path.write_bytes(data)
        with pytest.raises(UsageError):
            Journal.reopen(path)
        assert path.read_bytes() == data and not is_locked(path)


def test_two_processes_do_not_go_on_with_the_same_run(path: Path) -> None:
    journal = Journal.new(path, record())
    assert is_locked(path)
    with pytest.raises(UsageError):
        Journal.reopen(path)
    journal.close()
    assert not is_locked(path)
    Journal.reopen(path)[0].close()


def test_it_is_written_while_the_run_goes_on(path: Path) -> None:
    journal = Journal.new(path, record())
    journal.add(0, [10], None)
    deadline = time.monotonic() + DEADLINE_S
    while read_record(path).texts[0].ids != [10]:
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    journal.close()


@pytest.mark.parametrize("n_bytes", [0, 7], ids=["nothing", "a part"])
def test_a_full_disk_is_told_once_and_nothing_is_lost_when_it_has_space_again(
    path: Path, n_bytes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_module, "SYNC_S", 0.01)
    write, is_full, n_tries = os.write, threading.Event(), 0

    def failing(file: int, data: memoryview) -> int:
        nonlocal n_tries
        if is_full.is_set() and len(data) > 1:
            n_tries += 1
            if n_bytes:
                write(file, data[:n_bytes])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(journal_module.os, "write", failing)
    journal = Journal.new(path, record())
    is_full.set()
    journal.add(0, [10], None)
    deadline = time.monotonic() + DEADLINE_S
    while n_tries < 3:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    assert read_record(path).texts[0].ids == []
    is_full.clear()
    journal.add(0, [11], None)
    journal.close()
    assert read_record(path).texts[0].ids == [10, 11]
    assert caplog.text.count("No space left") == 1


def test_a_line_that_could_not_be_written_whole_does_not_stay(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.new(path, record())
    before, write, n_writes = path.read_bytes(), os.write, 0

    def half(file: int, data: memoryview) -> int:
        nonlocal n_writes
        n_writes += 1
        if n_writes > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: len(data) // 2])

    monkeypatch.setattr(journal_module.os, "write", half)
    journal.add(0, [10], None)
    journal.close()
    assert n_writes > 1 and path.read_bytes() == before


def test_runs_are_found_listed_and_removed(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        find_run(tmp_path, "last")
    names = []
    for i in range(3):
        path = written(new_run(tmp_path))
        if i < 2:
            os.utime(path, (1e9 + i, 1e9 + i))
        names.append(path.parent.name)
    assert [run.name for run in runs_in(tmp_path)] == [names[2]], "the others were too old when the next one began"
    assert find_run(tmp_path, "last") == find_run(tmp_path, names[2]) == find_run(tmp_path, str(tmp_path / names[2]))
    assert describe_runs(tmp_path) == [f"{names[2]}  tiny: 1 of 2 texts ended, 4 tokens"]
    with pytest.raises(UsageError) as e:
        find_run(tmp_path, "another")
    assert names[2] in str(e.value)
    remove_run(find_run(tmp_path, "last"))
    assert not list(tmp_path.iterdir())


def test_no_more_than_some_runs_are_kept_and_none_that_goes_on_is_removed(tmp_path: Path) -> None:
    running = Journal.new(new_run(tmp_path), record())
    os.utime(running.path, (0, 0))
    for _ in range(N_KEPT + 3):
        written(new_run(tmp_path))
    assert len(runs_in(tmp_path)) == N_KEPT and running.path.exists()
    assert time.time() - running.path.stat().st_mtime > KEPT_S
    running.close()


def test_a_run_of_a_board_whose_clock_was_not_set_is_kept(tmp_path: Path) -> None:
    path = written(new_run(tmp_path))
    os.utime(path, (3600, 3600))
    new_run(tmp_path)
    assert [run.path for run in runs_in(tmp_path)] == [path]
