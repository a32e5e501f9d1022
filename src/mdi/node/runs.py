"""The present and last runs of a secondary by their ids, and the rings of each, whose epochs count."""

from __future__ import annotations

import threading

from mdi.control.messages import InitRequest
from mdi.errors import Code, ControlError
from mdi.node.worker import RingWorker

N_REMEMBERED = 16  # ended runs: their starters ask for the metrics
N_STOPPED = 256  # ids of runs that were stopped: requests for their rings may come late
REPLACE_S = 10.0  # for a ring to end in favour of another one of its run


class Runs:
    """All methods may be called from any thread.

    Args:
        name: of the node.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # a signal handler asks, too
        self.rings: dict[str, list[RingWorker]] = {}  # of each run, the latest last; the latest run last
        self._stopped: dict[str, None] = {}  # runs, the latest last

    def add(self, worker: RingWorker) -> None:
        with self._lock:
            rings = [one for one in self.rings.pop(worker.run, []) if not one.has_ended.is_set()]
            self.rings[worker.run] = [*rings, worker]
            ended = [run for run, rings in self.rings.items() if all(one.has_ended.is_set() for one in rings)]
            for run in ended[:-N_REMEMBERED]:
                del self.rings[run]

    def find(self, run: str | None, epoch: str | None = None) -> RingWorker | None:
        """The latest ring of a run that has not ended; else the last one, one that had begun if there is one.

        Args:
            epoch: of the ring, if it must be a certain one.
        """
        with self._lock:
            rings = [one for one in self.rings.get(run or "", []) if epoch in (None, one.request.epoch)]
            active = [one for one in rings if not one.has_ended.is_set()]
            return next(reversed(active or [one for one in rings if one.has_begun] or rings), None)

    def active_of(self, run: str) -> list[RingWorker]:
        """The rings of a run that have not ended: one, and perhaps the next one, which is prepared."""
        with self._lock:
            return [worker for worker in self.rings.get(run, []) if not worker.has_ended.is_set()]

    @property
    def active(self) -> list[RingWorker]:
        """All rings that have not ended."""
        with self._lock:
            return [worker for run in self.rings for worker in self.active_of(run)]

    @property
    def is_running(self) -> bool:
        """Whether a ring is closed here."""
        return any(worker.is_running for worker in self.active)

    @property
    def latest(self) -> RingWorker | None:
        """Of the rings that have not ended, the one nearest to computing; else the last one."""
        ranks = {"RUNNING": 2, "LOADING": 1}
        if active := self.active:
            return max(active, key=lambda worker: ranks.get(worker.state, 0))
        with self._lock:
            return next((rings[-1] for rings in reversed(self.rings.values())), None)

    def stop(self, run: str) -> bool:
        """End all rings of a run, and refuse those whose requests come late; whether the run was known."""
        with self._lock:
            self._stopped.pop(run, None)
            self._stopped[run] = None
            for old in list(self._stopped)[:-N_STOPPED]:
                del self._stopped[old]
        for worker in self.active_of(run):
            worker.end()
        return self.find(run) is not None

    def stop_ring(self, run: str, epoch: str) -> None:
        """End a ring that was prepared while another one of its run goes on; nothing if it has ended, or is closed."""
        for worker in self.active_of(run):
            if worker.request.epoch == epoch and not worker.is_running:
                worker.end()

    def admit(self, request: InitRequest) -> bool:
        """End what blocks a new ring: present rings of its run, and runs whose starter is gone.

        Returns:
            False if this very ring is being formed already: its request came twice.

        Raises:
            ControlError (busy): another run does not share the node, or the old ring does not end; (run): the request is older
                than that of the run's present ring, and was late; (stopped): its run has been stopped.
        """
        with self._lock:
            latest = next(reversed(self.rings.get(request.run, [])), None)
        if request.run in self._stopped:
            raise ControlError(f"this run was ended on {self._name}", 409, code=Code.STOPPED)
        if latest is not None and int(latest.request.epoch, 16) > int(request.epoch, 16):
            raise ControlError(f"{self._name} takes part in a later ring of this run", 409, code=Code.RUN)
        for i, before in enumerate(self.active_of(request.run)):
            if before.request.epoch == request.epoch:
                return False
            # The first is the run's present ring: the starter may know before this node does that it is closed.
            if request.is_ahead and (before.is_running or (i == 0 and before.begins_within(REPLACE_S))):
                continue
            before.replace()
            if not before.has_ended.wait(REPLACE_S):
                raise ControlError(f"{self._name} is still in another ring of this run", 409, code=Code.BUSY)
        for worker in self.active:
            if not worker.is_running and worker.is_abandoned:
                worker.end()
            elif worker.run != request.run and (request.exclusive or worker.request.exclusive):
                raise self.busy()
        return True

    def busy(self) -> ControlError:
        latest = self.latest
        return ControlError(
            f"{self._name} is busy with another run ({latest.state if latest is not None else 'IDLE'})",
            409,
            code=Code.BUSY,
        )
