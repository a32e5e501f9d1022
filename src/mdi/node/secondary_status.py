"""The status of a secondary's runs and stages (`GET /`). Only callers with a run's id see more: /stop accepts that id."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from mdi.checkpoint.store import BlockStore
from mdi.node.job import Job
from mdi.node.stage_slots import Slot

PATIENCE_S = 0.5

logger = logging.getLogger(__name__)

T = TypeVar("T")


class InTime:
    """Asks a disk in a thread of its own: with a disk that hangs, a node must not look dead to those who ask it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[str, tuple[threading.Thread, list[Any]]] = {}

    def ask(self, what: str, find: Callable[[], T]) -> T | None:
        """What `find` returns, or None if it cannot be read or takes longer than PATIENCE_S. `what` is asked once at a time."""
        with self._lock:
            thread, found = self._asked.get(what, (None, []))
            if thread is None:
                thread = threading.Thread(target=self._find, args=(what, find, found), name="status-disk", daemon=True)
                self._asked[what] = thread, found
                thread.start()
        thread.join(PATIENCE_S)
        return found[0] if found else None

    def _find(self, what: str, find: Callable[[], T], found: list[T]) -> None:
        try:
            found.append(find())
        except OSError as e:
            logger.debug("the disk cannot be asked: %s", e)
        finally:
            with self._lock:
                del self._asked[what]


def run_status(job: Job | None, is_known: bool, store: BlockStore, in_time: InTime) -> dict[str, Any]:
    """The requested run; else the one that decides the node's state.

    Args:
        is_known: whether the caller knows its id.
    """
    active = job if job is not None and not job.is_over else None
    return {
        "state": job.state if job is not None else "IDLE",
        "error": job.error if job is not None else None,
        "error_code": job.error_code if job is not None else None,
        "progress": {"bytes": active.received_bytes, "total_bytes": active.total_bytes} if active else None,
        "looking": active.looking if active else None,
        "loading": active.loading if active else None,
        **_known_status(job if is_known else None, store, in_time),
    }


def _known_status(job: Job | None, store: BlockStore, in_time: InTime) -> dict[str, Any]:
    report_caches = job.report_caches if job is not None else None
    measure = job.measure if job is not None else None
    return {
        "epoch": job.request.epoch if job is not None else None,
        "lost": asdict(job.lost) if job is not None and job.lost is not None else None,
        "sent_rows": _sent_rows(job) if job is not None else None,
        "caches_kept": job.has_caches if job is not None else None,
        "missing": missing_of(job, store, in_time) if job is not None and not job.is_over else None,
        "metrics": job.metrics if job is not None else None,
        "measured": measure() if measure is not None else None,
        "caches": report_caches().to_json() if report_caches is not None else None,
    }


def _sent_rows(job: Job) -> dict[str, int]:
    """Of each text, positions whose rows can be replayed to the next node."""
    sent = job.slot.sent if job.slot.run == job.run else None
    return {} if sent is None else {str(seq_id): n for seq_id, n in sent.counts.items()}


def missing_of(job: Job, store: BlockStore, in_time: InTime) -> list[dict[str, Any]] | None:
    """The parts that the starter must send, with the bytes of an earlier try; None until this is known."""
    missing = job.missing
    if not missing:
        return None if missing is None else []
    parts = list(missing)
    have = in_time.ask(job.request.epoch, lambda: {sha256: store.partial_bytes(sha256) for sha256 in parts})
    if have is None:
        return None
    return [{"sha256": sha256, "have_bytes": n} for sha256, n in have.items() if sha256 in missing]


def slot_status(slot: Slot, job: Job | None, run: str | None) -> dict[str, Any]:
    """Of one stage in memory.

    Args:
        job: of the run that uses it, or used it last.
        run: that whoever asks knows.
    """
    state = slot.use
    if state == "USED":
        state = job.state if job is not None and job.slot is slot else "LOADING"
    own = {"run": run} if run == slot.run else {}
    return {
        "model": slot.model,
        "blocks": slot.blocks,
        "device": slot.device,
        "state": state,
        "weight_bytes": slot.weight_bytes,
        "cache_bytes": slot.cache_bytes,
        **own,
    }
