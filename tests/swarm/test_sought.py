"""While a run seeks a ring, it goes on asking who holds the blocks: they move meanwhile, and what it knows expires."""

from __future__ import annotations

from mdi.cancel import Cancel
from mdi.run.loop import Lookout
from waiting import until


class Asking:
    n_asked = 0

    def best(self, ring: object, processes: object) -> None:
        raise AssertionError("there is no ring")

    def while_sought(self) -> None:
        self.n_asked += 1
        if self.n_asked == 1:
            raise OSError("no network for a moment")


def test_nodes_are_asked_while_there_is_no_ring() -> None:
    asking, cancel = Asking(), Cancel()
    lookout = Lookout(asking, lambda: None, lambda event: None, cancel)
    until(lambda: asking.n_asked > 1)
    cancel.cancel()
    lookout.join()
