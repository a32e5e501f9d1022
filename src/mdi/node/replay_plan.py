"""Whether caches that a node has lost can be restored from the rows that the node before it sent, and who does what for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mdi.control.client import ControlClient
from mdi.control.fan_out import FanOut
from mdi.engine.sent_rows import FILL, PASS
from mdi.recovery.replacement import Next

ASK_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplayPlan:
    """Attributes:
    roles: by name of each secondary that has one, what it does with replays (engine.secondary_loop).
    is_by_starter: whether the starter's own rows are replayed.
    kept: positions of each text, from the first on, whose rows are there.
    """

    roles: Mapping[str, str]
    is_by_starter: bool
    kept: Mapping[int, int]


def plan_replay(
    following: Next, own: Mapping[int, int], clients: Mapping[str, ControlClient], run: str
) -> ReplayPlan | None:
    """None if no text can be restored so: then all are computed again from their token ids.

    Computing the rows of a text again on one node is never slower than on all of them, one after the other: so it is done where
    the rows are there.

    Args:
        following: the next ring, with the cut of the one before.
        own: positions whose rows the starter has sent, by text.
        clients: of all secondaries.
        run: its id.
    """
    names = following.names
    places = [k for k, name in enumerate(names) if name in following.fresh]
    if 0 in places or len(names) < 2:
        return None
    before = [names[k - 1] for k in places]
    roles = {name: PASS if name in following.fresh else FILL for name in before if name != names[0]}
    asked = FanOut({name: partial(_sent_rows, clients[name], run) for name, role in roles.items() if role == FILL})
    asked.join(ASK_S)
    counts: list[Mapping[int, int]] = [asked.results.get(name, {}) for name, role in roles.items() if role == FILL]
    if names[0] in before:
        counts.append(own)
    kept = _least(counts) if places else dict.fromkeys(own, 1 << 60)
    return ReplayPlan(roles, names[0] in before, kept) if kept else None


def _sent_rows(client: ControlClient, run: str) -> dict[int, int]:
    found = client.status(run, ASK_S).get("sent_rows")
    if not isinstance(found, dict):
        return {}
    return {int(seq_id): n for seq_id, n in found.items() if str(seq_id).isdigit() and type(n) is int}


def _least(counts: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """What all of them have."""
    common = set.intersection(*(set(one) for one in counts)) if counts else set()
    return {seq_id: min(one[seq_id] for one in counts) for seq_id in common}
