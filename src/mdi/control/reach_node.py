"""Waits for a node that may be started later than this one."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

import mdi
from mdi.cancel import Cancel, Periodic
from mdi.control.client import ControlClient
from mdi.control.messages import COMPILING, CONTROL_VERSION
from mdi.errors import ControlError, NodeLostError, RingError
from mdi.units import duration

BUSY_S = 12.0  # a node whose last starter was killed gives it up after ten seconds of silence

COMPILED_S = 0.1
COMPILING_TOLD_S = 10.0

logger = logging.getLogger("mdi")


def reach_node(client: ControlClient, wait_s: float, cancel: Cancel) -> dict[str, Any]:
    """The status of a node, waited for; a starter may well be started before its secondaries.

    A node that compiles its kernels is waited for, however long that takes: it answers meanwhile.

    Raises:
        NodeLostError: it does not answer in time.
        RingError: it is of another version.
        ControlError: something else answers there.
    """
    deadline = time.monotonic() + wait_s
    report = Periodic(COMPILING_TOLD_S)
    for attempt in itertools.count():
        cancel.check()
        try:
            status = client.status()
        except ControlError as e:
            if e.status is not None:
                raise
            if e.problem == "silent":  # there is a process, but it hangs or was stopped
                raise NodeLostError(
                    client.node.name, f"{e}: look at the output of {client.node.name}, end it, and start it again"
                ) from None
            if time.monotonic() > deadline:
                raise NodeLostError(
                    client.node.name, f"{e}: is secondary.py running there, and are address and communication port right? "
                    "doctor.py tells more",
                ) from None  # fmt: skip
            if attempt == 6:  # three seconds: a node that is just starting is not reported
                logger.info("waiting for %s (up to %.0f s): %s", client.node.name, wait_s, e)
            cancel.wait(0.5)
            continue
        if status["state"] != COMPILING:
            break
        deadline = time.monotonic() + wait_s
        if report.is_due():
            logger.info("%s", compiling(client.node.name, status))
        cancel.wait(COMPILED_S)
    if status.get("control_version") != CONTROL_VERSION:
        raise RingError(
            f"{client.where} runs version {status.get('version')} of MDI-LLM (control protocol "
            f"{status.get('control_version')}), this machine version {mdi.__version__} (control protocol {CONTROL_VERSION}): "
            "install the same version on both"
        )
    return status


def compiling(name: str, status: dict[str, Any]) -> str:
    """A line about a node that compiles its kernels, which it began when it was started."""
    up_s = status.get("up_s")
    so_far = f" ({duration(up_s)} so far)" if isinstance(up_s, (int, float)) else ""
    return f"{name} compiles its kernels, once{so_far}"
