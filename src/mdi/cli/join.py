"""Make this machine a node of a cluster: fetch its key with the code of an invitation, keep it, and wait for a starter.

examples:
  mdi join 192.168.1.10:8088 ABCD-EFGH-IJKL-MNOP
      as the starter printed it on 192.168.1.10 (`mdi starter --key FILE --nodes 3`, or `mdi key FILE --invite`)
  mdi join
      the next time: this machine has the key, and a starter with it finds this node in the network
  mdi join 192.168.1.10:8088 ABCD-EFGH-IJKL-MNOP --install-service
      the same, as a service that comes back after a reboot (`mdi join --uninstall-service` removes it)
  mdi join --model org/name
      one of a standing swarm: it holds blocks of a model for all runs, those that the others lack most; what it needs of a
      model that is not here comes from them
  mdi join --dial 203.0.113.5:8089
      behind a router: this node connects to the starter's machine (`mdi starter --dial-port 8089`), which then reaches it
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mdi.cancel import Cancel, CancelledError
from mdi.control.web_pages import is_here as is_loopback
from mdi.errors import UsageError
from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Parser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mdi.net.invitation import GuestNode
    from mdi.node.secondary import SecondaryNode
    from mdi.spec.cluster import NodeConfig

LOOK_S, POLL_S = 10.0, 0.5  # for nodes that have a model, before it is fetched
ADDRESS_S = 10.0  # between two looks at this machine's address

logger = logging.getLogger("mdi")


FIRST = (
    "--key", "--port", "--addr", "--install-service", "--cache-dir", "--threads", "--memory", "--model", "--verb",
)  # fmt: skip


def add_arguments(parser: Parser) -> None:
    from mdi.cli.secondary import add_node_options

    parser.options(
        None, "where", "code", "key", "port", "port_in", "addr", "no_start",
        key={"help": "where the key is kept (default: in your settings folder)"},
        port={"help": "control port, or the next free one (%(default)s)", "default": 8088},
        addr={"help": "address to listen on (default: that of the route to the cluster)"},
    )  # fmt: skip
    parser.options(None, "install_service", "uninstall_service", is_one=True)
    parser.options("a standing swarm", "stand_with", "max_blocks", "peer", "ckpt_folder", "hf_token", "revision")
    add_node_options(parser)
    parser.options(None, *COMMON)


def run(options: Options, cancel: Cancel) -> int:
    from mdi.cli.access import default_key_file, free_port, ip_address, network_address, split_address
    from mdi.cli.service import arguments_of, find_service
    from mdi.cli.session import is_here, with_model
    from mdi.net.invitation import GuestNode
    from mdi.spec.cluster import NodeConfig

    service = find_service() if options.install_service or options.uninstall_service else None
    if service is not None and options.uninstall_service:
        service.uninstall()
        return 0
    key = (options.key or default_key_file()).expanduser()
    if (options.where is None) != (options.code is None):
        raise UsageError("give the address and the code that `mdi key FILE --invite` printed, or nothing at all")
    host, where = (None, 0) if options.where is None else split_address(options.where, 0)
    addr = options.addr or network_address(host, cancel)
    port, port_in = free_port(addr, options.port), free_port(addr, options.port_in)
    name = socket.gethostname()[:40] or "secondary"
    if host is not None and options.code is not None:
        is_reached = not options.no_start and options.dial is None
        fetch(
            host,
            where,
            options.code,
            key,
            GuestNode(name, addr if ":" in addr else ip_address(addr), port, port_in) if is_reached else None,
        )
    elif not key.exists():
        raise UsageError(
            f"{key} has no key yet: `mdi key {key}` makes a new one; `mdi key FILE --invite`, on a node that has one, shares it"
        )
    if options.no_start:
        return 0
    if service is not None:
        kept = {"key": key, "port": port, "port_in": port_in, "where": None, "code": None, "install_service": None}
        service.install(arguments_of(options, **kept))
        return 0
    if options.stand_with is not None:
        model, options = options.stand_with, replace(options, key=key)
        if is_here(model, options.ckpt_folder) or not others_have(options, model, addr):
            options = with_model(replace(options, model=model), cancel)
    entry = {"addr": addr, "communication": {"port": port}, "inference": {"port_in": port_in}}
    logger.debug("in a starter's nodes file, among the secondaries: %s", json.dumps(entry))
    return serve_here(replace(options, key=key), NodeConfig(name, addr, port, port_in), host, cancel)


def serve_here(options: Options, config: NodeConfig, towards: str | None, cancel: Cancel) -> int:
    """Run this node until it is asked to end; without --addr, anew whenever this machine gets another address."""
    from mdi.cli import heed_interrupts
    from mdi.cli.access import free_port, network_address
    from mdi.cli.secondary import serve

    if options.addr is not None:
        return serve(options, config)
    while True:
        moved = threading.Event()
        status = serve(options, config, during=partial(followed, towards=towards, moved=moved))
        if not moved.is_set():
            return status
        heed_interrupts()
        addr = network_address(towards, cancel)
        logger.info("this machine's address is %s now", addr)
        config = replace(config, addr=addr, port=free_port(addr, config.port), port_in=free_port(addr, config.port_in))


@contextlib.contextmanager
def followed(node: SecondaryNode, towards: str | None, moved: threading.Event) -> Iterator[None]:
    """Within: `moved` is set, and the node's `run` returns, once this machine has another address and no run needs the node.

    An address that comes back counts, too: what announces the node does not outlive an interface.
    """
    from mdi.cli.access import own_address

    has_ended, was_away = threading.Event(), False

    def look() -> None:
        nonlocal was_away
        while not has_ended.wait(ADDRESS_S):
            addr = own_address(towards)
            if is_loopback(addr) and not is_loopback(node.config.addr):
                was_away = True
            elif (was_away or addr != node.config.addr) and not node.runs.active and not node.is_leaving:
                moved.set()
                return node.turns.close()

    thread = threading.Thread(target=look, name="address", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def others_have(options: Options, name: str, addr: str) -> bool:
    """Whether a standing node holds blocks of a model, and so gives its parts. Raises MdiError."""
    from mdi.cli.access import open_keys, split_address
    from mdi.cli.discover import neighbours
    from mdi.control.meeting import Peer
    from mdi.node.swarm_member import is_named
    from mdi.run.swarm import Swarm

    keys, peers = open_keys(options), [Peer(*split_address(text, 0)) for text in options.peer]
    with neighbours(options, addr, keys) as found:
        swarm, end = Swarm(peers, keys, 0.0, found), Cancel(LOOK_S)
        while not end.is_cancelled:
            swarm.look()
            if any(is_named(one, name) for one in swarm.present):
                logger.info("%s is not here; other nodes of this key have it", name)
                return True
            with contextlib.suppress(CancelledError):
                end.wait(POLL_S)
    return False


def fetch(addr: str, port: int, code: str, path: Path, node: GuestNode | None = None) -> None:
    """Get the keys of an invitation, and keep them in `path`, a new file. The host learns of `node`. Raises MdiError."""
    from mdi.control.client import ask_to_join
    from mdi.net.invitation import Guest
    from mdi.net.keys import parse_keys, write_keys

    guest = Guest(code, node)
    if path.exists():  # it may be the only copy; the code stays good
        raise UsageError(
            f"{path} has a cluster's key already: run `mdi join` without address and code to use it; to join another cluster, "
            "give another file with --key"
        )
    keys = parse_keys(guest.open(ask_to_join(addr, port, guest.request)).decode("utf-8", "replace"), f"{addr}:{port}")
    write_keys(path, keys)
    logger.info("the cluster's key is in %s", path)
