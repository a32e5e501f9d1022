"""What a process may use: the limits of control groups in both forms, and of a system without any."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import psutil
import pytest

from mdi.control_groups import n_cores
from mdi.host.resources import cpu_model, device_free_bytes, free_memory_bytes, memory_bytes, private_bytes

GB = 1 << 30


def affinity() -> float:
    return float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def groups(tmp_path: Path, membership: str, **files: str) -> tuple[Path, Path]:
    """A tree of groups; `__` in a name is a slash."""
    root = tmp_path / "cgroup"
    root.mkdir(exist_ok=True)
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = tmp_path / "membership"
    own.write_text(membership)
    return root, own


def test_without_groups_the_affinity_counts(tmp_path: Path) -> None:
    where = (tmp_path / "nowhere", tmp_path / "nothing")
    assert n_cores(*where) == affinity()
    assert 0 < free_memory_bytes(*where) <= psutil.virtual_memory().total == memory_bytes(*where)


def test_a_quota_of_the_second_version(tmp_path: Path) -> None:
    where = groups(tmp_path, "0::/a/b\n", a__b__cpu_DOT_max="60000 100000\n", a__cpu_DOT_max="max 100000\n")
    assert n_cores(*where) == 0.6
    where = groups(tmp_path, "0::/a/b\n", a__cpu_DOT_max="15000 100000\n")
    assert n_cores(*where) == 0.15, "the limit of a group above counts as well"


def test_a_quota_of_the_first_version(tmp_path: Path) -> None:
    files = {"cpu,cpuacct__a__cpu_DOT_cfs_quota_us": "30000\n", "cpu,cpuacct__a__cpu_DOT_cfs_period_us": "100000\n"}
    assert n_cores(*groups(tmp_path, "5:memory:/\n4:cpu,cpuacct:/a\n0::/\n", **files)) == 0.3
    files["cpu,cpuacct__a__cpu_DOT_cfs_quota_us"] = "-1\n"
    assert n_cores(*groups(tmp_path, "4:cpu,cpuacct:/a\n", **files)) == affinity()


@pytest.mark.parametrize("text", ["", "max", "nonsense", "1000 0", "max 100000"])
def test_a_quota_that_is_none(tmp_path: Path, text: str) -> None:
    assert n_cores(*groups(tmp_path, "0::/\n", cpu_DOT_max=text)) == affinity()


def test_the_path_of_the_host_inside_a_container(tmp_path: Path) -> None:
    where = groups(tmp_path, "0::/docker/abc\n", cpu_DOT_max="50000 100000")
    assert n_cores(*where) == 0.5
    where = groups(tmp_path, "0::/../../x\n", cpu_DOT_max="40000 100000")
    assert n_cores(*where) == 0.4


def test_memory_limits_of_both_versions(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    two = groups(
        tmp_path / "two",
        "0::/a\n",
        a__memory_DOT_max=f"{2 * GB >> 8}\n",
        a__memory_DOT_current=f"{GB >> 8}\n",
        a__memory_DOT_stat=f"anon 5\nshmem 7\nactive_file {GB >> 11}\ninactive_file {GB >> 11}\n",
    )
    assert free_memory_bytes(*two) == (GB >> 8) + (GB >> 10), "pages of files can be dropped"
    assert memory_bytes(*two) == 2 * GB >> 8
    (tmp_path / "one").mkdir()
    one = groups(
        tmp_path / "one",
        "7:memory:/a/b\n",
        memory__a__memory_DOT_limit_in_bytes=f"{1 << 20}\n",
        memory__a__memory_DOT_usage_in_bytes=f"{1 << 19}\n",
        memory__a__b__memory_DOT_limit_in_bytes="9223372036854771712\n",
        memory__a__b__memory_DOT_usage_in_bytes="1000\n",
    )
    assert free_memory_bytes(*one) == 1 << 19, "the tightest limit on the way up"
    assert memory_bytes(*one) == 1 << 20
    (tmp_path / "one" / "cgroup" / "memory" / "a" / "memory.usage_in_bytes").write_text(f"{1 << 21}")
    assert free_memory_bytes(*one) == 0, "never less than nothing"


def test_this_process() -> None:
    before = private_bytes()
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # new pages: an allocator may have some left that count already
    with mmap.mmap(-1, 32 << 20, flags=private) as block:
        block.write(b"1" * len(block))
        assert private_bytes() - before > 24 << 20
    assert device_free_bytes("cpu") == pytest.approx(free_memory_bytes(), rel=0.2)
    assert cpu_model()
