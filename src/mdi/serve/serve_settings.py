"""The user's choices for the server, as the API process gets them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

DRAIN_S = 15.0  # for requests under way when the server ends


@dataclass(frozen=True)
class ApiKey:
    """Attributes:
    digest: sha256 of the key, in hex; the key itself is not kept.
    name: its name in the log and the queue.
    priority: larger goes first.
    """

    digest: str
    name: str
    priority: int = 0


@dataclass(frozen=True)
class ServeSettings:
    """See the flags of serve.py.

    Attributes:
        keys: of clients; () accepts everybody who reaches the port.
        hosts: names by which the server may be called, beside its own address; "*" is any.
        origins: of foreign web pages that may use the API; () is none.
        max_running: most texts at the same time; others wait.
        max_waiting: texts that wait at most; more are refused.
        keep_alive_s: a model that was not used for so long is unloaded; None: never.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[ApiKey, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_running: int = 256
    max_waiting: int = 512
    keep_alive_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ServeSettings:
        known = {f.name: values[f.name] for f in fields(cls)}
        known["keys"] = tuple(ApiKey(**key) for key in known["keys"])
        return cls(**{**known, "hosts": tuple(known["hosts"]), "origins": tuple(known["origins"])})


def digest_of(key: str) -> str:
    """The digest of an API key, which is kept in its place."""
    return hashlib.sha256(key.encode()).hexdigest()
