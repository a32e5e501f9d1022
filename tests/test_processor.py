"""What is noticed of a processor on which this build of torch does not run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from mdi.host import device as processor
from mdi.host.device import processor_notice

PI_4 = "processor\t: 0\nFeatures\t: fp asimd evtstrm crc32 cpuid\nCPU part\t: 0xd08\n"
PI_5 = "processor\t: 0\nFeatures\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimddp\n"
NVPL = "  - Build settings: BLAS_INFO=nvpl, BUILD_TYPE=Release"
OPENBLAS = "  - Build settings: BLAS_INFO=open, BUILD_TYPE=Release"


def test_a_board_without_atomics_and_a_build_for_servers() -> None:
    notice = processor_notice(PI_4, NVPL, "2.13.0+cu130")
    assert notice is not None and "2.13.0+cu130" in notice and "requirements.txt" in notice and "\n" not in notice


@pytest.mark.parametrize("cpuinfo, build", [(PI_5, NVPL), (PI_4, OPENBLAS), ("", NVPL), ("flags : sse2 avx2", NVPL)])
def test_others_are_not_told(cpuinfo: str, build: str) -> None:
    assert processor_notice(cpuinfo, build, "2.13.0") is None


def test_it_is_told_as_a_node_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cpuinfo").write_text(PI_4)
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(processor.sys, "platform", "linux")
    monkeypatch.setattr(torch.__config__, "show", lambda: NVPL)
    with caplog.at_level(logging.WARNING, logger="mdi"):
        processor.warn_of_processor()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "none")
    processor.warn_of_processor()
