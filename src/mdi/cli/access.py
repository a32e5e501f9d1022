"""Access to the nodes: the cluster key, and the addresses on which a node may listen without one."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mdi.errors import UsageError
from mdi.spec.options import Options

if TYPE_CHECKING:
    from mdi.cancel import Cancel
    from mdi.net.keys import KeyFile
    from mdi.spec.cluster import ClusterConfig, NodeConfig

KEY_VARIABLE = "MDI_KEY_FILE"
N_PORTS_TRIED = 32
DIAL_PORT = 8089
ANYBODY, ANYBODY_6 = "192.0.2.1", "2001:db8::1"  # reserved (RFC 5737, RFC 3849): nobody is there
NETWORK_S = 1.0  # between two looks for a network

logger = logging.getLogger("mdi")


def open_keys(options: Options) -> KeyFile | None:
    """The key file of --key, else of the environment, else None. Raises UsageError."""
    from mdi.net.keys import KeyFile

    named = options.key or os.environ.get(KEY_VARIABLE) or None
    return None if named is None else KeyFile(Path(named).expanduser())


def users_keys(options: Options) -> KeyFile | None:
    """The key file of --key, else of the environment, else the one that `mdi join` and --machines keep. Raises UsageError."""
    from mdi.net.keys import KeyFile

    keys = open_keys(options)
    return KeyFile(default_key_file()) if keys is None and default_key_file().exists() else keys


def with_machines(options: Options) -> Options:
    """For --machines: the same as --nodes N with a key, which is made if there is none. Raises UsageError."""
    from dataclasses import replace

    from mdi.net.keys import new_secret, write_keys

    if options.machines is None:
        return options
    addr = options.addr or own_address()
    if options.addr is None and _is_loopback(addr):
        raise UsageError("this machine is in no network now, so no other machine could join: connect it, or see --addr")
    named = options.key or os.environ.get(KEY_VARIABLE)
    path = Path(named).expanduser() if named else default_key_file()
    if not named and not path.exists():
        write_keys(path, (new_secret(),))
        logger.info("the cluster's key is new: %s", path)
    # A machine behind a router is not found otherwise, and who starts this cannot know that it is there.
    dial_port = options.dial_port or free_port(addr, DIAL_PORT)
    return replace(options, key=path, nodes=options.machines, dial_port=dial_port)


def with_keys(options: Options, cluster: ClusterConfig) -> ClusterConfig:
    """The cluster with its key. UsageError if the key cannot be read, or is needed and missing."""
    from dataclasses import replace

    keys = open_keys(options)
    if cluster.secondaries or cluster.starter.port:
        refuse_exposure(options, keys, cluster.starter)
    return replace(cluster, keys=keys)


def refuse_exposure(options: Options, keys: KeyFile | None, node: NodeConfig) -> None:
    """Raises UsageError if the node would listen beyond this machine without a key."""
    if keys is None and not options.insecure and not _is_loopback(node.listen_addr):
        raise UsageError(
            f"{node.name} would listen on {node.listen_addr} without a key: make one with `mdi key FILE`, copy the file to "
            "each node and start all with --key FILE (or, if everybody in the network may use the nodes, with --insecure)"
        )


def _is_loopback(addr: str) -> bool:
    return all(ipaddress.ip_address(found.partition("%")[0]).is_loopback for found in _addresses(addr))


def _addresses(addr: str) -> Sequence[str]:
    try:
        ipaddress.ip_address(addr.partition("%")[0])
        return [addr]
    except ValueError:
        pass
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(addr, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []  # not a name to listen on: binding reports that


def default_key_file() -> Path:
    """Where `mdi join` keeps a key: a settings folder, because caches may be cleaned."""
    if os.name == "nt":
        return Path(os.environ.get("APPDATA", Path.home())) / "mdi-llm" / "cluster.key"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "mdi-llm" / "cluster.key"


def own_address(towards: str | None = None) -> str:
    """This machine's address on the route to `towards`, or on the default route; 127.0.0.1 without one. Sends nothing."""
    return (towards and route_address(towards)) or route_address(ANYBODY) or "127.0.0.1"


def network_address(towards: str | None, cancel: Cancel) -> str:
    """The same, of IPv6 if there is no other network; without any, waits for one. Raises the error of `cancel`."""
    is_told = False
    while True:
        addr = (towards and route_address(towards)) or route_address(ANYBODY) or route_address(ANYBODY_6)
        if addr is not None:
            return addr
        if not is_told:
            is_told = True
            logger.info("this machine is in no network yet: waiting for one (--addr ADDR does not wait)")
        cancel.wait(NETWORK_S)


def route_address(target: str) -> str | None:
    """This machine's address on the route to an address or a name; None if there is no route. Sends nothing."""
    family = socket.AF_INET6 if target == ANYBODY_6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((target, 9))
            return str(sock.getsockname()[0])
    except OSError:
        return None


def ip_address(addr: str) -> str:
    """The IPv4 address of a name; for 0.0.0.0, this machine's address on the default route."""
    try:
        found = str(socket.getaddrinfo(addr, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        found = "0.0.0.0"
    return own_address() if found == "0.0.0.0" else found


def free_port(addr: str, first: int) -> int:
    """The first free port from `first` on. UsageError if there is none, or if the address is not this machine's."""
    with held_port(addr, first) as held:
        return port_of(held)


def held_port(addr: str, first: int) -> socket.socket:
    """The same port, which nobody else finds free until the socket is closed."""
    for port in range(first, min(first + N_PORTS_TRIED, 65536)):
        try:
            family = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((addr, port), family=family)
        except OSError:
            continue
    raise UsageError(
        f"no port from {first} on is free on {addr}, or this machine does not have that address: see --addr, --port"
    )


def port_of(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port


def split_address(text: str, default_port: int) -> tuple[str, int]:
    """Address and port of "192.168.1.10:8088" or "[fe80::1]:8088"; 0 as default_port requires one. UsageError."""
    addr, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        addr, port = text, str(default_port or "")
    if not addr or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise UsageError(f"expected an address like 192.168.1.10:8088, got {text!r}")
    return addr.strip("[]"), int(port)
