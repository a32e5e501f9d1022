"""Whether lost caches can be restored from the rows that the previous node sent, and each node's part in that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mdi.engine.replay import FILL, PASS
from mdi.recovery.replacement import Next

Counts = Mapping[int, int]  # of each text, positions whose rows were sent and kept, from the first on


@dataclass(frozen=True)
class ReplayPlan:
    """Attributes:
    is_by_starter: whether the starter's own rows are replayed.
    kept: positions of each text, from the first on, whose rows are there.
    """

    is_by_starter: bool
    kept: Mapping[int, int]


@dataclass(frozen=True)
class ReplayRoles:
    """What the nodes of a ring do so that caches are restored from rows.

    Computing the rows of a text again on one node is never slower than on all of them, one after the other: so it is done where
    the rows are there.

    Attributes:
        by_name: of each secondary that has a part in it, what it does with replays (engine.worker).
        is_by_starter: whether the starter's own rows are replayed.
        has_lost: whether a node has lost its caches, so that there is something to restore.
    """

    by_name: Mapping[str, str]
    is_by_starter: bool
    has_lost: bool

    def plan(self, own: Counts, told: Mapping[str, Counts]) -> ReplayPlan | None:
        """By the rows that all nodes have that send some; None if no text can be restored so.

        Args:
            own: the rows that the starter has.
            told: what each secondary reports.
        """
        senders = [told.get(name, {}) for name, role in self.by_name.items() if role == FILL]
        if self.is_by_starter:
            senders.append(own)
        kept = _least(senders) if self.has_lost else dict.fromkeys(own, 1 << 60)
        return ReplayPlan(self.is_by_starter, kept) if kept else None


def replay_roles(following: Next) -> ReplayRoles | None:
    """For the next ring, with the cut of the one before; None if the starter has lost its caches, or is alone."""
    names, fresh = following.names, following.fresh
    if names[0] in fresh or len(names) < 2:
        return None
    before = [names[k - 1] for k, name in enumerate(names) if name in fresh]
    roles = {name: PASS if name in fresh else FILL for name in before if name != names[0]}
    return ReplayRoles(roles, names[0] in before, bool(fresh.intersection(names)))


def _least(counts: Sequence[Counts]) -> dict[int, int]:
    """What all of them have."""
    common = set.intersection(*(set(one) for one in counts)) if counts else set()
    return {seq_id: min(one[seq_id] for one in counts) for seq_id in common}
