"""The status of a secondary's runs and stages (`GET /`). Only callers with a run's id see more: /stop accepts that id."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from mdi.checkpoint.store import BlockStore
from mdi.node.worker import RingWorker
from mdi.stages.store import HeldStage

PATIENCE_S = 0.5

logger = logging.getLogger(__name__)

T = TypeVar("T")


class InTime:
    """Asks a disk in a thread of its own: with a disk that hangs, a node must not look dead to those who ask it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[str, tuple[threading.Thread, list[Any]]] = {}

    def ask(self, what: str, find: Callable[[], T]) -> T | None:
        """Call `find`, once at a time for each `what`; None if it fails or takes longer than PATIENCE_S."""
        with self._lock:
            thread, found = self._asked.get(what, (None, []))
            if thread is None:
                thread = threading.Thread(target=self._find, args=(what, find, found), name="status-disk", daemon=True)
                try:
                    thread.start()  # it waits for the lock before it ends
                except RuntimeError as e:  # no thread can be had at the moment
                    logger.debug("the disk cannot be asked: %s", e)
                    return None
                self._asked[what] = thread, found
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


class RingWatch:
    """The statuses of a ring, for its starter: it waits for changes; and what only counts up is looked at now and then.

    Args:
        status: of the ring.
    """

    def __init__(self, worker: RingWorker, status: Callable[[], dict[str, Any]]) -> None:
        self._worker, self._status = worker, status
        self._n_seen = -1
        self._last: dict[str, Any] | None = None

    @property
    def has_ended(self) -> bool:
        return self._worker.has_ended.is_set()

    def changed(self, timeout_s: float) -> dict[str, Any] | None:
        worker = self._worker
        with worker.changed:
            worker.changed.wait_for(lambda: worker.n_changes != self._n_seen, timeout_s)
            self._n_seen = worker.n_changes
        status = self._status()
        if status == self._last:
            return None
        self._last = status
        return status

    def touch(self) -> None:
        self._worker.cancel.touch()


def run_status(worker: RingWorker | None, is_known: bool, store: BlockStore, in_time: InTime) -> dict[str, Any]:
    """The requested run; else the one that decides the node's state.

    Args:
        is_known: whether the caller knows its id.
    """
    active = worker if worker is not None and not worker.has_ended.is_set() else None
    return {
        "state": worker.state if worker is not None else "IDLE",
        "error": worker.error if worker is not None else None,
        "error_code": worker.error_code if worker is not None else None,
        "progress": {"bytes": active.received_bytes, "total_bytes": active.total_bytes} if active else None,
        "looking": _looking(active) if active else None,
        "loading": _loading(active) if active else None,
        **_known_status(worker if is_known else None, store, in_time),
    }


def _loading(worker: RingWorker) -> dict[str, int] | None:
    """How far the stage is, while it is built."""
    if worker.state != "LOADING" or not worker.is_loading:
        return None
    return {"done": worker.n_loaded, "total": len(worker.request.parts)}


def _looking(worker: RingWorker) -> dict[str, int] | None:
    """How far it is with looking for the weights that are here already."""
    if worker.state != "LOADING" or worker.missing is not None:
        return None
    return {"done": worker.n_looked_for, "total": len(worker.request.parts)}


def _known_status(worker: RingWorker | None, store: BlockStore, in_time: InTime) -> dict[str, Any]:
    report_caches = worker.report_caches if worker is not None else None
    measure = worker.measure if worker is not None else None
    return {
        "epoch": worker.request.epoch if worker is not None else None,
        "lost": asdict(worker.lost) if worker is not None and worker.lost is not None else None,
        "sent_rows": _sent_rows(worker) if worker is not None else None,
        "caches_kept": worker.held.has_caches if worker is not None else None,
        "stage_arithmetic": asdict(worker.held.spec.arithmetic) if worker is not None else None,
        "window": worker.held.spec.window is not None if worker is not None else None,
        "missing": missing_of(worker, store, in_time) if worker is not None and not worker.has_ended.is_set() else None,
        "metrics": worker.metrics if worker is not None else None,
        "measured": measure() if measure is not None else None,
        "caches": report_caches().to_json() if report_caches is not None else None,
    }


def _sent_rows(worker: RingWorker) -> dict[str, int]:
    """Of each text, positions whose rows can be replayed to the next node."""
    sent = worker.held.sent if worker.held.run == worker.run else None
    return {} if sent is None else {str(seq_id): n for seq_id, n in sent.counts.items()}


def missing_of(worker: RingWorker, store: BlockStore, in_time: InTime) -> list[dict[str, Any]] | None:
    """The parts that the starter must send, with the bytes of an earlier try; None until this is known."""
    missing = worker.missing
    if not missing:
        return None if missing is None else []
    parts = list(missing)
    have = in_time.ask(worker.request.epoch, lambda: {sha256: store.partial_bytes(sha256) for sha256 in parts})
    if have is None:
        return None
    return [{"sha256": sha256, "have_bytes": n} for sha256, n in have.items() if sha256 in missing]


def slot_status(held: HeldStage, worker: RingWorker | None, run: str | None, process: str) -> dict[str, Any]:
    """Of one stage in memory.

    Args:
        worker: of the run that uses it, or used it last.
        run: that whoever asks knows.
        process: of the node, which holds stages for all runs itself, if it is a standing one.
    """
    state = held.use
    if state == "USED" and held.owner == process and held.stage is not None:
        state = "HELD"
    elif state == "USED":
        state = worker.state if worker is not None and worker.held is held else "LOADING"
    own = {"run": run} if run == held.run else {}
    return {
        "model": held.spec.model.name,
        "blocks": held.spec.blocks,
        "device": held.device,
        "state": state,
        "weight_bytes": held.weight_bytes,
        "cache_bytes": held.cache_bytes,
        **own,
    }
