"""The nodes of a run that no nodes file names: they announce themselves, dial in, or join with a code that is printed here."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from mdi.cancel import Cancel
from mdi.spec.options import Options
from mdi.terminal import reporting, show

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from mdi.control.discovery import Arrivals, FoundNode, Guests, Source
    from mdi.control.relay import Relay
    from mdi.net.invitation import GuestNode
    from mdi.net.keys import KeyFile
    from mdi.node.secondary import SecondaryNode
    from mdi.spec.cluster import ClusterConfig, NodeConfig

CONTROL_PORT, RING_PORT = 8088, 5088
REPEAT_S = 60.0  # after which the line for other machines is shown again
LISTEN_S = 3.0  # announcements come within a second, and an answer of a busy board within two
INVITED_WAIT_S = 900.0  # as long as a code is good
HEAD_S = 300.0  # besides --wait: an engine may start process 0 of a job later than the others

logger = logging.getLogger("mdi")


class Discovery:
    """How a command finds the nodes of its key. It holds the ports that nodes dial, which are open until it ends."""

    def __init__(self, options: Options, cancel: Cancel | None = None) -> None:
        self._options = options
        self.cancel = Cancel(parent=cancel)  # its end ends a search
        self._relays: dict[tuple[str, int], Relay] = {}  # nodes behind one are reached through it
        self._guests: Guests | None = None
        self._open_dial_port()

    def _open_dial_port(self) -> None:
        """At once: nodes may dial while a model is still fetched, and wait for this starter then. Raises UsageError."""
        from mdi.cli.access import open_keys, own_address

        port = self._options.dial_port
        keys = None if port is None else open_keys(self._options)
        if port is not None and keys is not None:
            self._relay(self._options.addr or own_address(), port, keys)

    def cluster(self) -> ClusterConfig:
        """The nodes: those of a given file, else the nodes with the given key, else the file of the checkout.

        Raises:
            UsageError, ControlError: the file is wrong; too few nodes come.
        """
        from mdi.cli import default_nodes_config
        from mdi.cli.access import open_keys
        from mdi.spec.cluster import load_cluster

        options = self._options
        if options.nodes_config is None and (
            options.nodes is not None or options.dial_port is not None or open_keys(options) is not None
        ):
            return self.present_nodes()
        return load_cluster(options.nodes_config or default_nodes_config())

    def present_nodes(self) -> ClusterConfig:
        """The present nodes, printed as they come. Raises UsageError, ControlError: there are too few."""
        from mdi.cli.access import held_port, open_keys, own_address, port_of
        from mdi.control.discovery import Gathering, cluster_of
        from mdi.errors import UsageError
        from mdi.spec.cluster import NodeConfig

        options = self._options
        keys = open_keys(options)
        if keys is None:
            raise UsageError("nodes are found by their key: make one with `mdi key FILE`, and give it with --key FILE")
        addr = options.addr or own_address()
        wanted = None if options.nodes is None else options.nodes - 1
        wait_s = options.wait_s if wanted is None else max(options.wait_s, INVITED_WAIT_S)
        guests = self.guests(keys)
        with (
            held_port(addr, RING_PORT) as ring,  # other starters may wait for their nodes at the same time
            held_port(addr, CONTROL_PORT) as control,
            self.sources(keys, addr) as found,
            ExitStack() as stack,
        ):
            starter = NodeConfig("starter", addr, port_of(control), port_of(ring))
            renew = stack.enter_context(inviting(starter, keys, 0 if options.no_invite else wanted, guests, control))
            logger.info("looking for nodes of this key on %s ...", addr)
            gathering = Gathering([*found, guests.nodes], keys, lambda node: logger.info("%s", describe(node)))
            nodes = gathering.wait(wanted, wait_s, renew, lambda line: logger.info("%s", line), self.cancel)
        cluster = cluster_of(nodes, starter, keys)
        for node, config in zip(nodes, cluster.secondaries, strict=True):
            logger.info("%s is %s", config.name, node.label)
        return cluster

    def present_now(self, keys: KeyFile, wait_s: float = LISTEN_S) -> list[FoundNode]:
        """The nodes of a key that announce themselves or have joined once, and answer within so long. Raises UsageError."""
        from mdi.cli.access import own_address
        from mdi.control.discovery import Gathering

        with self.sources(keys, self._options.addr or own_address()) as found:
            return Gathering([*found, self.guests(keys).nodes], keys).within(wait_s, self.cancel)

    def cluster_now(self, keys: KeyFile) -> ClusterConfig:
        """The same with this machine as the starter, on the ports that a run would take. UsageError if no node answers."""
        from mdi.cli.access import free_port, own_address
        from mdi.control.discovery import cluster_of
        from mdi.errors import UsageError
        from mdi.spec.cluster import NodeConfig

        logger.info("listening for the nodes of %s for %g s ...", keys.path, LISTEN_S)
        nodes = self.present_now(keys)
        if not nodes:
            raise UsageError(
                f"no node of the key {keys.path} answers in this network: run `mdi join` on the machines, or give a nodes file "
                "with --nodes-config"
            )
        addr = self._options.addr or own_address()
        starter = NodeConfig("starter", addr, free_port(addr, CONTROL_PORT), free_port(addr, RING_PORT))
        cluster = cluster_of(nodes, starter, keys)
        for node, config in zip(nodes, cluster.secondaries, strict=True):
            logger.info("%s is %s", config.name, node.label)
        return cluster

    @contextmanager
    def sources(self, keys: KeyFile, addr: str) -> Iterator[list[Source]]:
        """The sources of nodes."""
        with ExitStack() as stack:
            # The network of an address that the user gave, else all networks of this machine.
            yield self._listen(keys, addr, [addr] if self._options.addr else [], stack)

    def _listen(self, keys: KeyFile, addr: str, interfaces: Sequence[str], stack: ExitStack) -> list[Source]:
        """The same until the stack is closed. Raises UsageError."""
        from mdi.control.mdns import Browser

        browser = Browser(keys, interfaces)
        stack.callback(browser.close)
        found: list[Source] = [browser.nodes]
        if (port := self._options.dial_port) is not None:
            found.append(self._relay(addr, port, keys).nodes)
        return found

    def _relay(self, addr: str, port: int, keys: KeyFile) -> Relay:
        """One relay per port."""
        from mdi.control.relay import Relay

        if (addr, port) not in self._relays:
            relay = self._relays[addr, port] = Relay(addr, port, keys)
            if not self._options.no_invite:
                logger.info("nodes that cannot be reached: mdi join --dial %s:%d", addr, relay.port)
        return self._relays[addr, port]

    def guests(self, keys: KeyFile) -> Guests:
        """The nodes of this key that have joined, today or earlier."""
        from mdi.control.discovery import Guests

        if self._guests is None:
            self._guests = Guests(keys.path.with_name(f"{keys.path.name}.nodes"))
        return self._guests

    def arrivals(self, cluster: Callable[[], ClusterConfig | None]) -> Arrivals | None:
        """Nodes that are started during a run; None where they are not wanted, or could not prove anything."""
        from mdi.cli.access import ip_address, open_keys
        from mdi.control.discovery import Arrivals

        keys = None if self._options.fixed else open_keys(self._options)
        if keys is None:
            return None

        def heard(stack: ExitStack) -> list[Source]:
            found = cluster()
            assert keys is not None and found is not None
            addr = found.starter.addr
            return [*self._listen(keys, addr, [ip_address(addr)], stack), self.guests(keys).nodes]

        return Arrivals(heard, keys)

    def close(self) -> None:
        self.cancel.cancel()
        for relay in self._relays.values():
            relay.close()
        self._relays.clear()

    def __enter__(self) -> Discovery:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def reachable(options: Options, node: SecondaryNode, keys: KeyFile | None) -> Iterator[None]:
    """While this node waits and works, the starters of its cluster can find it.

    Raises:
        UsageError: it cannot be found so. ControlError: it is a process of a job, whose process 0 does not come, or not again.
    """
    from mdi.cli.access import own_address, split_address
    from mdi.errors import ControlError, UsageError

    config, process = node.config, node.process
    lost: list[str] = []

    def gone(why: str) -> None:
        lost.append(why)
        if node.may_hand_over:
            node.leave()
        else:
            node.turns.close()

    with ExitStack() as stack:
        if keys is None:
            if options.dial is not None:
                raise UsageError("--dial needs the cluster's key: see --key, and `mdi key --help`")
            yield
            return
        if options.dial is not None:
            from mdi.control.relay import DialOut

            own = own_address() if config.listen_addr in ("0.0.0.0", "::") else config.listen_addr
            ports = {"control": (own, node.control_port), "ring": (own, node.ring_port)}
            relay, is_job = split_address(options.dial, 0), options.job != ()  # all processes of a job reach each other
            first_s = options.wait_s + HEAD_S
            stack.callback(
                DialOut(relay, keys, config.name, process, ports, is_job, gone if is_job else None, first_s).close
            )
        elif not options.no_announce:
            stack.callback(_announced(node, keys))
        yield
    if lost:
        raise ControlError(f"process 0 of this job is not there: {lost[0]}; what it printed says why")


@contextmanager
def neighbours(options: Options, addr: str, keys: KeyFile | None) -> Iterator[Callable[[], list[NodeConfig]]]:
    """Nodes of this key that announce themselves in the network of an address; none if others were named (--peer)."""
    from mdi.cli.access import ip_address
    from mdi.control.mdns import Browser
    from mdi.errors import UsageError
    from mdi.spec.cluster import NodeConfig

    if keys is None or options.peer or options.swarm or options.no_announce:
        yield list
        return
    try:
        browser = Browser(keys, [ip_address(addr)])
    except UsageError as e:
        logger.warning("%s", e)
        yield list
        return
    try:
        yield lambda: [NodeConfig(one.name, one.addr, one.port, one.ring_port) for one in browser.nodes()]
    finally:
        browser.close()


def _announced(node: SecondaryNode, keys: KeyFile) -> Callable[[], None]:
    """Announce a node in its own network; returns what ends that. Without multicast, only logs."""
    from mdi.cli.access import ip_address
    from mdi.control.discovery import Announcement
    from mdi.control.mdns import Announcer
    from mdi.errors import UsageError

    config = node.config
    if ":" in config.addr:
        logger.warning(
            "%s is not announced in this network, which has no IPv4: see --dial, or write a nodes file", config.name
        )
        return lambda: None
    addr = ip_address(config.addr)
    announcement = Announcement.of(config.name, addr, node.control_port, node.ring_port, node.process, keys.first)
    try:
        return Announcer(announcement, [addr]).close
    except UsageError as e:
        logger.warning("%s", e)
        return lambda: None


@contextmanager
def inviting(starter: Any, keys: KeyFile, n_wanted: int | None, guests: Guests, held: socket.socket) -> Iterator[Any]:
    """A code for the machines that are to join, as long as some are waited for; gives what renews one that is too old.

    Args:
        guests: gets those that have joined, and is asked for them where there is no multicast.
        held: has the starter's control port, which is given to who invites.
    """
    if not n_wanted:
        yield lambda: None
        return
    import mdi
    from mdi.control.server import ControlServer, StatusOnly
    from mdi.net.invitation import Invitations
    from mdi.net.keys import text_of

    class Waiting(StatusOnly):
        def status(self, run: str | None) -> dict[str, Any]:
            return {"name": starter.name, "version": mdi.__version__, "state": "WAITING"}

    line = ""

    def tell(code: str) -> None:
        nonlocal line
        boards = "the other machine" if n_wanted == 1 else f"each of the other {n_wanted} machines"
        line = f"on {boards}:  mdi join {starter.addr}:{starter.port} {code}"
        show(line, out=sys.stderr)

    def welcome(node: GuestNode, addr: str) -> None:
        logger.info("%s at %s:%d has fetched the key", node.name, node.addr, node.port)
        guests.add(node, addr)

    held.close()
    invitations = Invitations(text_of(keys.keys).encode(), tell, n_wanted, on_guest=welcome)
    server = ControlServer(Waiting(), starter.addr, starter.port, starter.name, keys, invitations)
    try:
        with reporting(lambda: line, REPEAT_S, REPEAT_S):  # in the place of lines that would move this one out of sight
            yield invitations.renew
    finally:
        server.close()


def describe(node: FoundNode) -> str:
    """A line about a node that has come."""
    from mdi.control.reach import compiling

    if node.is_compiling:
        return compiling(f"{node.label} is there; it", node.status)
    return f"{node.label} is there: {what_it_has(node.status)}"


def what_it_has(status: dict[str, Any]) -> str:
    """Memory, devices and state, as far as a node says them."""
    from mdi.units import size

    free, device, state = free_memory(status), status.get("device"), status.get("state")
    parts = [f"{size(free)} free" if free is not None else "", str(device or ""), str(state or "")]
    return ", ".join(part for part in parts if part)


def free_memory(status: dict[str, Any]) -> int | None:
    """Bytes, as a node says; None if it does not."""
    memory = status.get("memory")
    free = memory.get("available_bytes") if isinstance(memory, dict) else None
    return free if isinstance(free, int) else None
