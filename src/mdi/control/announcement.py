"""The announcement of a node on its network: its address, and a tag by which nodes of its cluster recognise it.

The tag is a short code over the announcement and a salt that the node draws at its start. Without the key nobody can make a
tag, or see whether two nodes have the same key. A copied tag only announces the node that it belongs to.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from mdi.net.keys import mac

SALT_BYTES = 8
TAG_BYTES = 8
NAME_LIMIT = 40
_LABEL = "mdi discovery"


@dataclass(frozen=True)
class Announcement:
    """Where a node is.

    Attributes:
        name: as its owner calls it; for people.
        addr, port: where its control port is.
        ring_port: on which the node before it in a ring connects.
        process: the number that its process drew; a restarted node has another one. "" if it is not known yet.
    """

    name: str
    addr: str
    port: int
    ring_port: int
    process: str
    salt: str
    tag: str

    @property
    def where(self) -> str:
        return f"{self.addr}:{self.port}"

    @classmethod
    def of(cls, name: str, addr: str, port: int, ring_port: int, process: str, secret: bytes) -> Announcement:
        """Signed with a cluster's key."""
        salt = secrets.token_hex(SALT_BYTES)
        return cls(name, addr, port, ring_port, process, salt, _tag(secret, salt, addr, port, ring_port, process))

    def is_of(self, keys: tuple[bytes, ...]) -> bool:
        """Whether a node with one of these keys made it."""
        fields = (self.salt, self.addr, self.port, self.ring_port, self.process)
        return any(hmac.compare_digest(self.tag.encode(), _tag(key, *fields).encode()) for key in keys)

    def fields(self) -> dict[str, str]:
        """The texts of an announcement besides address and control port."""
        return {
            "name": self.name,
            "ring": str(self.ring_port),
            "process": self.process,
            "salt": self.salt,
            "tag": self.tag,
        }

    @classmethod
    def parse(cls, addr: str, port: int, fields: Mapping[str, str]) -> Announcement | None:
        """The content of an announcement; None if it cannot be read."""
        try:
            ring_port = int(fields["ring"])
            found = cls(
                fields["name"][:NAME_LIMIT], addr, port, ring_port, fields["process"], fields["salt"], fields["tag"]
            )
        except (KeyError, ValueError):
            return None
        is_port = 0 < port < 65536 and 0 < ring_port < 65536
        return found if is_port and max(map(len, found.fields().values())) <= NAME_LIMIT else None


def _tag(secret: bytes, salt: str, addr: str, port: int, ring_port: int, process: str) -> str:
    fields = (salt, addr, str(port), str(ring_port), process)
    return mac(secret, _LABEL, *(field.encode() for field in fields))[:TAG_BYTES].hex()
