"""mem_monitor: what a command and its children hold, its exit status, and signals that reach it."""

from __future__ import annotations

import csv
import errno
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mdi.cli import launch
from mdi.errors import UsageError
from mdi_tools import gpu_memory
from mdi_tools.gpu_memory import Gpu
from mdi_tools.mem_monitor_command import series_of_nodes, split_command, summary, title_of
from mdi_tools.process_memory import COLUMNS, Family, MemorySample, ProcessUsage, monitor, node_of
from waiting import until

SRC = Path(__file__).resolve().parents[1] / "src"
MB = 1_000_000
# Holds 60 MB, starts a child with 40 MB more, says so, and waits for a line.
CHILD = "held = bytearray(b'x') * 40_000_000; print('held', flush=True); input()"
PARENT = (
    "import subprocess, sys; held = bytearray(b'x') * 60_000_000; "
    f"child = subprocess.Popen([sys.executable, '-c', {CHILD!r}]); sys.exit(child.wait())"
)
# Holds 50 MB until the table of samples has two more rows.
SEEN = """
import pathlib, sys, time
table = pathlib.Path(sys.argv[1])
held = bytearray(b"x") * 50_000_000
n_rows = table.read_bytes().count(b"\\n")
while table.read_bytes().count(b"\\n") < n_rows + 2:
    time.sleep(0.01)
"""
NO_GPU = Gpu()
NO_GPU.baseline_bytes = None


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_children_count() -> None:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with process:
        assert process.stdout.readline() == b"held\n"
        family = Family(process.pid, NO_GPU)
        sample = family.sample(1.5)
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 0
    assert len(sample.usages) == 2 and sample.gpu_bytes is None
    sizes = {usage.pid: usage.rss_bytes for usage in sample.usages}
    assert sizes[process.pid] > 60 * MB and min(sizes.values()) > 40 * MB
    assert 100 * MB < sample.rss_bytes < 250 * MB
    if sys.platform.startswith("linux"):
        assert sample.uss_bytes is not None and sample.pss_bytes is not None
        assert 100 * MB < sample.uss_bytes <= sample.pss_bytes <= sample.rss_bytes
    assert not family.sample(2.0).usages, "what has ended holds nothing"


@pytest.mark.slow
def test_an_orphan_still_belongs_to_the_family() -> None:
    """The middle process ends; what it had started is known from before."""
    middle = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {CHILD!r}], stdin=0); "
        "print(child.pid, flush=True); input()"
    )
    read_end, write_end = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", middle], stdin=read_end, stdout=subprocess.PIPE)
    with os.fdopen(write_end, "wb", buffering=0) as pipe, process:
        os.close(read_end)
        assert process.stdout is not None
        orphan = psutil.Process(int(process.stdout.readline()))
        assert process.stdout.readline() == b"held\n"
        family = Family(process.pid, NO_GPU)
        assert len(family.sample(0.0).usages) == 2
        process.kill()
        process.wait(60)
        assert [usage.pid for usage in family.sample(1.0).usages] == [orphan.pid]
        orphan.kill()
        pipe.close()
        psutil.wait_procs([orphan], timeout=60)


def test_the_command_line_writes_its_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / "new" / f"{name}.csv" for name in ("total", "each")}
    begin = time.monotonic()
    status = launch(
        "mem-monitor",
        [
            "-i", "0.05", "-o", str(files["total"]), "--processes", str(files["each"]), "--img", str(tmp_path / "m.png"),
            sys.executable, "-c", SEEN, str(files["total"]),
        ],
    )  # fmt: skip
    took_s = time.monotonic() - begin
    assert status == 0
    rows = read(files["total"])
    assert tuple(rows[0]) == COLUMNS and len(rows) >= 2
    times = [float(row["time_s"]) for row in rows]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= took_s
    assert max(int(row["rss_bytes"]) for row in rows) > 50 * MB
    assert any(row["name"].startswith("python") for row in read(files["each"]))
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    assert "most memory: RSS" in capfd.readouterr().err


def test_without_output_the_table_comes_after_what_the_command_prints(capfd: pytest.CaptureFixture[str]) -> None:
    command = shlex.join([sys.executable, "-c", "print('one two'); raise SystemExit(7)"])
    assert launch("mem-monitor", [command]) == 7
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "one two" and lines[1] == ",".join(COLUMNS)


def test_called_and_read_as_the_first_version_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command in one string before the flags, and columns in MiB: of all processes, and of each GPU."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\ncase $1 in *gpu=memory.used) echo 100; echo 250;; esac\n")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    table = tmp_path / "m.csv"
    command = shlex.join([sys.executable, "-c", "import time; time.sleep(0.3)"])
    assert launch("mem-monitor", [command, "-o", str(table), "-i", "1", "--img", str(tmp_path / "m.png")]) == 0
    row = read(table)[0]
    assert list(row)[-3:] == ["RAM_MB", "GPU0_MB", "GPU1_MB"]
    assert (row["GPU0_MB"], row["GPU1_MB"]) == ("100", "250")
    assert abs(float(row["RAM_MB"]) - int(row["rss_bytes"]) / (1 << 20)) < 0.1 and (tmp_path / "m.png").is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 5), (signal.SIGTERM, 143), (signal.SIGKILL, 137)])
def test_signals_reach_the_command_and_its_status_comes_back(tmp_path: Path, number: int, status: int) -> None:
    """Ctrl-C is caught by the command, which ends in its own way; SIGTERM ends it; SIGKILL is sent to it directly."""
    code = (
        "import os, time\ntry:\n    print(os.getpid(), flush=True)\n    time.sleep(120)\n"
        "except KeyboardInterrupt:\n    raise SystemExit(5)"
    )
    command = [
        sys.executable,
        str(SRC / "mem_monitor.py"),
        "-o",
        str(tmp_path / "m.csv"),
        "--",
        sys.executable,
        "-c",
        code,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        child = int(process.stdout.readline())
        until(lambda: read(tmp_path / "m.csv"))  # the command may be killed before its first sample
        os.kill(child if number == signal.SIGKILL else process.pid, number)
        assert process.wait(60) == status, process.stderr.read()
    assert not psutil.pid_exists(child)
    assert read(tmp_path / "m.csv")


def test_a_quick_command_and_a_missing_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert monitor(["true"], 1.0, lambda sample: None) == 0
    assert launch("mem-monitor", ["no-such-program-at-all"]) == 2
    assert "cannot start 'no-such-program-at-all'" in capsys.readouterr().err
    assert launch("mem-monitor", ["-i", "0", "true"]) == 2
    assert launch("mem-monitor", ["-o", str(tmp_path), "true"]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_a_sample_that_cannot_be_kept_ends_the_command() -> None:
    began = time.monotonic()

    def full(sample: MemorySample) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError) as e:
        monitor([sys.executable, "-c", "import time; time.sleep(100)"], 0.1, full)
    assert e.value.errno == errno.ENOSPC
    assert time.monotonic() - began < 60


def test_commands_are_taken_apart() -> None:
    assert split_command(["--", "a", "b c"]) == ["a", "b c"]
    assert split_command(["a 'b c' d"]) == ["a", "b c", "d"]
    with pytest.raises(UsageError):
        split_command(["a 'b"])
    for nothing in ([], ["--"], [""]):
        with pytest.raises(UsageError):
            split_command(nothing)


SMI = """#!/bin/sh
case "$1" in
  --query-gpu*) cat {folder}/used ;;
  *) cat {folder}/apps ;;
esac
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_gpu_memory_of_the_processes_or_else_its_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program that answers as nvidia-smi does, for two GPUs."""
    (tmp_path / "nvidia-smi").write_text(SMI.format(folder=tmp_path))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "used").write_text("100\n50\n")
    (tmp_path / "apps").write_text("")
    gpu = Gpu()
    assert gpu.baseline_bytes == 150 << 20
    family = Family(os.getpid(), gpu)
    assert family.sample(0.0).gpu_bytes == 0
    (tmp_path / "used").write_text("400\n50\n")
    assert family.sample(1.0).gpu_bytes == 300 << 20, "the driver names no process, as in a container"
    (tmp_path / "apps").write_text(f"{os.getpid()}, 30\n{os.getpid()}, 12\n999999, 200\n77, [N/A]\n")
    sample = family.sample(2.0)
    assert sample.gpu_bytes == 42 << 20 and sample.usages[0].gpu_bytes == 42 << 20
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert Gpu().baseline_bytes is None
    monkeypatch.setattr(gpu_memory.shutil, "which", lambda name: None)
    assert Gpu().baseline_bytes is None and Gpu().growth_bytes() is None


def test_the_summary_names_the_peak() -> None:
    def of(time_s: float, *rss_bytes: int) -> MemorySample:
        return MemorySample(
            time_s, tuple(ProcessUsage(i, "x", rss, None, None, None) for i, rss in enumerate(rss_bytes))
        )

    assert summary([]) == "the command ended before its memory could be looked at"
    found = summary([of(0, 10 * MB), of(1, 2000 * MB, 500 * MB), of(2, 20 * MB)])
    assert found == "most memory: RSS 2.5 GB at 1.0 s in 2 processes; 3 samples"


def test_a_long_command_is_cut_between_words() -> None:
    words = [f"--flag-{i}" for i in range(60)]
    *shown, dots = title_of(words).split()
    assert dots == "..." and len(title_of(words)) <= 200 and shown == words[: len(shown)]
    assert title_of(["sample.py", "--prompt", "Who are you?"]) == "sample.py --prompt 'Who are you?'"


@pytest.mark.parametrize(
    "command, node",
    [
        (
            ["/venv/bin/python", "-m", "mdi.cli", "secondary", "--nodes-config", "/tmp/nodes.json", "1", "-v"],
            "secondary1",
        ),
        (["python", "src/secondary.py", "--nodes-config", "nodes.json", "0"], "secondary0"),
        (["python3.11", "/home/me/src/starter.py", "--ckpt", "secondary"], "starter"),
        (["python", "src/sample.py"], "sample"),
        (["sleep", "1"], "other"),
        ([], "other"),
    ],
)
def test_the_node_is_told_by_its_command(command: list[str], node: str) -> None:
    assert node_of(command) == node


def test_a_line_for_each_node() -> None:
    def usage(node: str, rss: int, pss: int | None) -> ProcessUsage:
        return ProcessUsage(1, "python", rss, pss, None, None, node)

    first = MemorySample(0.5, (usage("starter", 10, 8), usage("secondary0", 5, None)))
    second = MemorySample(1.0, (usage("starter", 20, 18), usage("starter", 3, 2)))
    assert series_of_nodes([first, second]) == {"secondary0": [(0.5, 5)], "starter": [(0.5, 8), (1.0, 20)]}


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_a_jetson_shares_its_memory_with_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program that answers as tegrastats does, for ever."""
    line = "11-21-2026 12:00:00 RAM {used}/3956MB (lfb 1x4MB) SWAP 0/1978MB (cached 0MB) CPU [2%@1479] GR3D_FREQ 0%"
    script = (
        f"#!/bin/sh\nwhile read -r used < {tmp_path}/used; do echo '{line}' | sed s/{{used}}/$used/; sleep 0.1; done\n"
    )
    (tmp_path / "tegrastats").write_text(script)
    (tmp_path / "tegrastats").chmod(0o755)
    (tmp_path / "used").write_text("1000\n")
    monkeypatch.setattr(gpu_memory, "nvidia_smi", lambda query: [])
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    gpu = Gpu()
    assert gpu.is_shared and gpu.baseline_bytes == 1000 << 20 and gpu.by_process() == {}
    (tmp_path / "used").write_text("1900\n")
    assert gpu.growth_bytes(200 << 20) == 700 << 20
