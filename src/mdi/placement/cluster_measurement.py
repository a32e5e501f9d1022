"""Measures a running cluster: every node measures itself, and every link of the ring is tried.

All nodes measure at the same time, as they compute in a run: those of one machine share its caches, its memory's speed and, if
they have more threads than it has cores, its cores. One that measured alone would promise what it never has beside the others.
Links are tried last, one by one.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mdi.cancel import Cancel, Periodic
from mdi.control.client import ControlClient, FanOut
from mdi.control.messages import ProbeRequest, ProfileRequest
from mdi.control.reach import BUSY_S, Route, reach_node, try_node
from mdi.errors import Code, ControlError, NodeLostError, UsageError
from mdi.host.threads import host_of
from mdi.placement.profile import LinkProfile, NodeProfile, level_times, share_memory
from mdi.spec.cluster import ClusterConfig, NodeConfig

ALL_PAIRS_LIMIT = 4  # up to so many nodes every link is tried, so that other orders can be judged as well
BROKEN_S = 1e4  # round trip of a way that does not exist: no placement will want it

logger = logging.getLogger("mdi")


class ClusterMeasurement:
    """Asks all secondaries of a cluster for their profiles.

    Args:
        cluster: with the ports that are really listened on, the starter's too.
        request: the model that they measure themselves with.
        own: measures the starter, on the calling thread.
        wait_s: how long to wait for a node that does not answer yet.
        cancel: its end ends the waiting.
        own_format: that the starter measures in.
        ask: asks a secondary, as ControlClient.profile does; busy_s: so long again, while it is busy.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        request: ProfileRequest,
        own: Callable[[], NodeProfile],
        wait_s: float,
        cancel: Cancel,
        own_format: str = "",
        ask: Callable[..., dict[str, Any]] | None = None,
        busy_s: float = BUSY_S,
    ) -> None:
        self._own_format = own_format
        self._ask_client, self._busy_s = ask or ControlClient.profile, busy_s
        self._cluster = cluster
        self._request = request
        self._own = own
        self._wait_s = wait_s
        self._cancel = cancel
        self._clients = {node.name: ControlClient(node, cluster.keys) for node in cluster.secondaries}
        self._found: dict[str, NodeProfile] = {}
        self._formats: dict[str, str] = {}
        self._reached: set[str] = set()
        self._measuring: dict[str, Any] = {}  # what a node measures at the moment
        self._ended = self._cancel.child()

    def run(self) -> tuple[tuple[NodeProfile, ...], tuple[LinkProfile, ...]]:
        """Profiles of all nodes, starter first, and of the links.

        Raises:
            NodeLostError: a node was lost meanwhile; its code is ABSENT if it has never answered.
            MdiError: a node is busy with another run, or cannot hold even one block.
        """
        try:
            return self._profiles(), self._links()
        except NodeLostError as e:
            raise e if e.node in self._reached else NodeLostError(e.node, str(e), Code.ABSENT) from None
        finally:
            self._ended.cancel()
            self._ended.close()

    def _profiles(self) -> tuple[NodeProfile, ...]:
        self._wait(self._all(self._reach))
        others = self._all(self._ask)
        starter = self._own()
        self._wait(others)
        found = (starter, *(self._found[node.name] for node in self._cluster.secondaries))
        machines = [host_of(node.addr) for node in self._cluster.nodes]
        profiles = share_memory(found, machines)
        tight = [new.name for old, new in zip(found, profiles, strict=True) if new != old]
        if tight:
            logger.info("%s share the memory of their machine: each counts with a part of it", ", ".join(tight))
        placed = tuple(replace(profile, machine=machine) for profile, machine in zip(profiles, machines, strict=True))
        alike = [
            (p.machine, p.device, p.n_cores, p.n_threads, self._formats.get(p.name, self._own_format)) for p in placed
        ]
        return level_times(placed, alike)

    @property
    def formats(self) -> dict[str, str]:
        """The format that each secondary measured in, by name: its own choice goes before the request's."""
        return self._formats

    def _all(self, work: Callable[[NodeConfig], None]) -> FanOut[None]:
        """A thread for each secondary."""
        return FanOut({node.name: partial(work, node) for node in self._cluster.secondaries})

    def _wait(self, asked: FanOut[None]) -> None:
        report = Periodic()
        while asked.is_working:
            self._cancel.check()
            asked.raise_error()
            if report.is_due():
                self._report()
            asked.join(0.1)
        asked.wait(self._cancel)

    def _reach(self, node: NodeConfig) -> None:
        reach_node(self._clients[node.name], self._wait_s, self._ended)
        self._reached.add(node.name)

    def _ask(self, node: NodeConfig) -> None:
        deadline = time.monotonic() + self._busy_s
        request = replace(self._request, device=node.device, threads=node.threads)
        while True:
            self._ended.check()
            try:
                answer = self._ask_client(
                    self._clients[node.name], request, partial(self._measuring.__setitem__, node.name), self._ended
                )
                break
            except ControlError as e:
                if e.status is None:
                    raise NodeLostError(node.name, f"{node.name} was lost while it measured itself: {e}") from None
                if not e.code.again or time.monotonic() > deadline:
                    raise
                self._ended.wait(0.2)
        try:
            profile = NodeProfile.from_json({**answer["profile"], "name": node.name}, f"the profile of {node.name}")
        except (KeyError, TypeError, UsageError) as e:
            raise ControlError(f"{node.name} sent a profile that cannot be read: {e}") from None
        self._formats[node.name] = str(answer.get("format", ""))
        self._tell_difference(node, profile.device, answer.get("threads"))
        self._found[node.name] = profile

    @staticmethod
    def _tell_difference(node: NodeConfig, device: str, threads: Any) -> None:
        """Log where a node was started with other options than the nodes file has: then the plan differs from the file."""
        for what, named, found in (("device", node.device, device), ("threads", node.threads, threads)):
            if named not in (None, "auto", found) and found is not None and f"{named}:0" != found:
                logger.info(
                    "%s computes with %s %s, as it was started; the nodes file says %s", node.name, what, found, named
                )

    def _report(self) -> None:
        for name, what in list(self._measuring.items()):
            if name not in self._found and isinstance(what, dict):
                logger.info("%s measures %s (%s of %s)", name, what.get("what"), what.get("done"), what.get("total"))

    def _links(self) -> tuple[LinkProfile, ...]:
        nodes = self._cluster.nodes
        if len(nodes) <= ALL_PAIRS_LIMIT:
            pairs = list(itertools.permutations(nodes, 2))
        else:
            pairs = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
        links = []
        report = Periodic()
        for i, (source, target) in enumerate(pairs):
            self._cancel.check()
            if report.is_due():
                logger.info("measuring the link from %s to %s (%d of %d)", source.name, target.name, i, len(pairs))
            link = self._link(source, target)
            if link is not None:
                links.append(link)
        return tuple(links)

    def _link(self, source: NodeConfig, target: NodeConfig) -> LinkProfile | None:
        """None if nothing could be measured; the link may work all the same."""
        request = ProbeRequest(target.name, target.addr, target.port, target.port_in, measure=True)
        client = self._clients.get(source.name)
        try:
            route = (
                try_node(request, keys=self._cluster.keys) if client is None else Route.from_json(client.probe(request))
            )
        except ControlError as e:
            logger.info("the link from %s to %s was not measured: %s", source.name, target.name, e)
            return None
        if not route.ring.is_ok:
            logger.warning(
                "%s cannot reach %s's ring port %s:%d (%s): mdi doctor says more",
                *(source.name, target.name, target.addr, target.port_in, route.ring.problem),
            )
            return LinkProfile(source.name, target.name, BROKEN_S, 1.0)
        if not route.ring.bytes_s:
            return None
        return LinkProfile(source.name, target.name, route.control.round_trip_s, route.ring.bytes_s)
