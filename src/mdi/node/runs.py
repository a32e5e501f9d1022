"""The present and last runs of a secondary by their ids, with the latest ring of each."""

from __future__ import annotations

import threading

from mdi.control.messages import InitRequest
from mdi.errors import ControlError
from mdi.node.job import Job

N_REMEMBERED = 16  # ended runs: their starters ask for the metrics
REPLACE_S = 10.0  # for a ring to end in favour of another one of its run


class Runs:
    """See the module. All methods may be called from any thread.

    Args:
        name: of the node.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # a signal handler asks, too
        self.jobs: dict[str, Job] = {}  # the latest last

    def add(self, job: Job) -> None:
        with self._lock:
            self.jobs.pop(job.run, None)
            self.jobs[job.run] = job
            over = [run for run, one in self.jobs.items() if one.is_over]
            for run in over[:-N_REMEMBERED]:
                del self.jobs[run]

    def find(self, run: str | None) -> Job | None:
        """The latest ring of a run, over or not."""
        with self._lock:
            return None if run is None else self.jobs.get(run)

    @property
    def active(self) -> list[Job]:
        """Those that are not over."""
        with self._lock:
            return [job for job in self.jobs.values() if not job.is_over]

    @property
    def is_running(self) -> bool:
        """Whether a ring is closed here."""
        return any(job.is_running for job in self.active)

    @property
    def latest(self) -> Job | None:
        """Of the runs that are not over, the one nearest to computing; else the last one."""
        ranks = {"RUNNING": 2, "LOADING": 1}
        if active := self.active:
            return max(active, key=lambda job: ranks.get(job.state, 0))
        with self._lock:
            return next(reversed(self.jobs.values()), None)

    def replace(self, request: InitRequest) -> bool:
        """End what blocks a new ring: its run's present ring, and runs whose starter is gone.

        Returns:
            False if this very ring is being formed already: its request came twice.

        Raises:
            ControlError (busy): another run does not share the node, or the old ring does not end; (run): the request is older
                than that of the run's present ring, and was late.
        """
        before = self.find(request.run)
        if before is not None and int(before.request.epoch, 16) > int(request.epoch, 16):
            raise ControlError(f"{self._name} takes part in a later ring of this run", 409, code="run")
        if before is not None and not before.is_over:
            if before.request.epoch == request.epoch:
                return False
            before.replace(self._name)
            if not before.over.wait(REPLACE_S):
                raise ControlError(f"{self._name} is still in another ring of this run", 409, code="busy")
        for job in self.active:
            if not job.is_running and job.is_abandoned:
                job.end()
            elif job.run != request.run and (request.exclusive or job.request.exclusive):
                raise self.busy()
        return True

    def busy(self) -> ControlError:
        latest = self.latest
        return ControlError(
            f"{self._name} is busy with another run ({latest.state if latest is not None else 'IDLE'})",
            409,
            code="busy",
        )
