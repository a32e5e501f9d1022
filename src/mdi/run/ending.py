"""The end of a run: collects the nodes' measurements and releases the secondaries."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from mdi.cancel import Cancel, CancelledError
from mdi.control.client import ControlClient
from mdi.control.fan_out import FanOut
from mdi.errors import ControlError

METRICS_DEADLINE_S = 5.0

logger = logging.getLogger("mdi")


def dismiss(clients: Sequence[ControlClient], run: str, leave: bool, patient: bool) -> list[dict[str, Any]]:
    """Let all secondaries go, at the same time; what each has measured, {} where that is not known.

    Args:
        run: the id of the run that has ended.
        leave: end their processes as well.
        patient: wait until they have noticed the end themselves; else tell them, and do not wait.
    """
    asked = FanOut({client.node.name: partial(_dismiss, client, run, leave, patient) for client in clients})
    asked.join(METRICS_DEADLINE_S * 3)
    return [asked.results.get(client.node.name, {}) for client in clients]


def _dismiss(client: ControlClient, run: str, leave: bool, patient: bool) -> dict[str, Any]:
    timeout_s = METRICS_DEADLINE_S if patient else 1.5
    measured: dict[str, Any] = {}
    try:
        with contextlib.suppress(CancelledError):  # it does not notice the end in time
            for status in client.watch(run, None, Cancel(timeout_s)) if patient else ():
                if status["state"] != "RUNNING":
                    measured = status.get("metrics") or {}
                    break
        if leave or not patient:
            client.stop(run, leave, timeout_s)
    except ControlError as e:
        if leave:
            logger.warning("%s did not get the request to end: %s", client.node.name, e)
        logger.debug("dismissing %s: %s", client.node.name, e)
    return measured
