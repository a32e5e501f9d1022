"""Measurements that a secondary makes on request: its speed with a model, and the link to another node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from mdi.cancel import Cancel
from mdi.checkpoint.store import BlockStore
from mdi.control.messages import ProbeRequest, ProfileRequest
from mdi.control.reach import try_node
from mdi.errors import CheckpointError, Code, ControlError, MemoryShortError
from mdi.host.threads import computing_threads, n_threads
from mdi.net.keys import KeyFile
from mdi.node.node_weights import NodeWeights
from mdi.node.round_robin import MainThreadTask, RoundRobin
from mdi.node.runs import Runs
from mdi.placement.profiler import Profiler
from mdi.placement.profiling import Subject
from mdi.stages.store import StageStore

PROFILE_S, PROBE_S = 170.0, 25.0
N_PROBES = 16


class SelfMeasurement:
    """A node measures itself on its computing thread, and only without a run.

    Args:
        admission: held while it is decided whether a run may begin.

    Attributes:
        planned_run: id of the run that it was measured for last, and may get no part in.
    """

    def __init__(
        self, name: str, profiler: Profiler, weights: NodeWeights, stages: StageStore, store: BlockStore, turns: RoundRobin,
        runs: Runs, admission: threading.Lock, keys: KeyFile | None,
    ) -> None:  # fmt: skip
        self._name = name
        self._profiler = profiler
        self._weights = weights
        self._stages = stages
        self._store = store
        self._turns = turns
        self._runs = runs
        self._admission = admission
        self._keys = keys
        self._probes = threading.BoundedSemaphore(N_PROBES)  # the one that is made, and those that wait for it
        self._probing = threading.Lock()
        self._task: MainThreadTask | None = None
        self.planned_run: str | None = None

    def check_idle(self) -> None:
        """Raises ControlError (busy) while the node measures itself."""
        if self._task is not None:
            raise ControlError(f"{self._name} is busy measuring itself", 409, code=Code.BUSY)

    def profile(self, request: ProfileRequest, note: Callable[[Any], None]) -> dict[str, Any]:
        """Runs have to wait for its few seconds. What was measured before, a node in a run can tell as well."""
        is_kept = self._is_kept(request)

        def measure(cancel: Cancel) -> dict[str, Any]:
            try:
                return self._profile(request, cancel)
            finally:
                self._task = None

        with self._admission:
            self.check_idle()
            if self._runs.active and not is_kept:
                raise ControlError(
                    f"{self._runs.busy()}, and measures itself only between runs: wait for the end of that one, or place the "
                    "blocks without measuring (--placement even)",
                    409,
                    code=Code.BUSY,
                )
            self.planned_run = request.run
            if not is_kept:
                self._task = task = MainThreadTask(measure)
        if is_kept:
            return self._profile(request, Cancel())
        self._turns.post(task)
        return task.result(PROFILE_S, lambda: note(self._profiler.progress))

    def probe(self, request: ProbeRequest) -> dict[str, Any]:
        self.check_echo()
        busy = ControlError(f"{self._name} is busy reaching another node", 409, code=Code.BUSY)
        if not self._probes.acquire(blocking=False):
            raise busy
        try:
            if not self._probing.acquire(timeout=PROBE_S):
                raise busy
            try:
                return try_node(request, keys=self._keys).to_json()
            finally:
                self._probing.release()
        finally:
            self._probes.release()

    def check_echo(self) -> None:
        """Raises ControlError (busy) in a run: its frames go the same way."""
        if self._runs.is_running:
            raise self._runs.busy()

    def _subject(self, request: ProfileRequest) -> Subject:
        return Subject(request.model.config, request.model.config_hash, self._weights.computing(request))

    def _is_kept(self, request: ProfileRequest) -> bool:
        return not request.fresh and self._profiler.is_kept(self._subject(request))

    def _profile(self, request: ProfileRequest, cancel: Cancel) -> dict[str, Any]:
        subject = self._subject(request)
        is_kept = self._is_kept(request)
        try:
            profile = self._profiler.profile(subject, self._store, request.fresh, cancel)
        except (CheckpointError, MemoryShortError):
            if not self._stages.drop_unused():  # the weights of earlier runs were in the way
                raise
            profile = self._profiler.profile(subject, self._store, request.fresh, cancel)
        with computing_threads(subject.computing.threads):
            threads = n_threads()
        return {"profile": profile.to_json(), "format": subject.computing.format, "threads": threads, "kept": is_kept}
