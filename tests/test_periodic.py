"""Saying something every two seconds."""

from __future__ import annotations

import pytest

from mdi.cancel import REPORT_S, Periodic


def test_it_is_due_once_in_two_seconds() -> None:
    now = 100.0
    report = Periodic(clock=lambda: now)
    assert not report.is_due() and report.passed_s == 0.0
    now += REPORT_S + 0.1
    assert report.is_due() and not report.is_due()
    now += REPORT_S - 0.1
    assert not report.is_due()
    now += 0.2
    assert report.is_due() and report.passed_s == pytest.approx(2 * REPORT_S + 0.2)
