"""Recognizes requests that a web page has sent, by their headers, so that they are refused before their body is read.

A browser sends a page's requests to any address that it reaches, this machine's own among them. The Origin header names the
page, the Host header shows a foreign name that points at this machine (DNS rebinding), and without asking first a page can send
only the content types of forms. Programs need none of these headers.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from mdi.errors import ControlError

BODY_TYPES = ("application/json", "application/octet-stream")
TYPE_WANTED = (
    "send the body as content-type application/json (curl: -H 'Content-Type: application/json') or application/octet-stream, "
    "or without a type"
)


def check_sender(headers: Mapping[str, str], is_open: bool) -> None:
    """Raises ControlError if a web page may have sent a request to a node, which has no pages of its own.

    Args:
        is_open: whether the node has no key. With a key the signature decides, and nodes may have any name.
    """
    if headers.get("Origin") is not None:
        raise ControlError("web pages may not use a node", 403)
    host = headers.get("Host", "")
    name = name_in(host)
    if is_open and host and not (is_address(name) or is_local_name(name)):
        raise ControlError(
            f"a node without a key does not accept the host name {host[:80]!r}: call it by its address, or start all nodes "
            "with the same --key FILE", 403,
        )  # fmt: skip
    if not is_body_type(headers.get("Content-Type", "")):
        raise ControlError(TYPE_WANTED, 415)


def is_body_type(content_type: str) -> bool:
    """Whether a body of this type may be read; without a type it may."""
    return content_type.partition(";")[0].strip().lower() in ("", *BODY_TYPES)


def name_in(host: str) -> str:
    """The name or address in a Host header, without the port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".").lower()
    except ValueError:
        return ""


def is_address(name: str) -> bool:
    """Anybody can point a name at this machine, but not an address."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def is_local_name(name: str) -> bool:
    """Whether no stranger can own the name: it has no domain, or is this machine's."""
    own = socket.gethostname().lower()
    return bool(name) and ("." not in name or name in (own, f"{own}.local"))


def is_here(addr: str) -> bool:
    """Whether an address is a loopback one."""
    try:
        found = ipaddress.ip_address(addr.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback
