"""The status of a secondary's runs and stages (`GET /`). Only callers with a run's id see more: /stop accepts that id."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mdi.checkpoint.store import BlockStore
from mdi.node.job import Job
from mdi.node.stage_slots import Slot


def run_status(job: Job | None, is_known: bool, store: BlockStore) -> dict[str, Any]:
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
        **_known_status(job if is_known else None, store),
    }


def _known_status(job: Job | None, store: BlockStore) -> dict[str, Any]:
    report_caches = job.report_caches if job is not None else None
    measure = job.measure if job is not None else None
    return {
        "epoch": job.request.epoch if job is not None else None,
        "lost": asdict(job.lost) if job is not None and job.lost is not None else None,
        "sent_rows": _sent_rows(job) if job is not None else None,
        "caches_kept": job.has_caches if job is not None else None,
        "missing": missing_of(job, store) if job is not None and not job.is_over else None,
        "metrics": job.metrics if job is not None else None,
        "measured": measure() if measure is not None else None,
        "caches": report_caches().to_json() if report_caches is not None else None,
    }


def _sent_rows(job: Job) -> dict[str, int]:
    """Of each text, positions whose rows can be replayed to the next node."""
    sent = job.slot.sent if job.slot.run == job.run else None
    return {} if sent is None else {str(seq_id): n for seq_id, n in sent.counts.items()}


def missing_of(job: Job, store: BlockStore) -> list[dict[str, Any]] | None:
    """The parts that the starter must send, with the bytes of an earlier try; None until this is known."""
    missing = job.missing
    if missing is None:
        return None
    return [{"sha256": p.sha256, "have_bytes": store.partial_bytes(p.sha256)} for p in list(missing.values())]


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
