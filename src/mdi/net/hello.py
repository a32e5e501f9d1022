"""The first frame of a link: the sender, its run and its placement.

Two nodes that disagree must say so at once, not produce nonsense later. Unknown extension keys are ignored, so that a
later version can add some (keys, compression) without a new protocol version.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from mdi.errors import WireError
from mdi.spec.decode import Text, Whole, decode_text
from mdi.terminal import one_line


@dataclass(frozen=True)
class Hello:
    """The first message of a node that connects to the next one; the answer is a HELLO of the other node, or an ERROR.

    Attributes:
        index: place of the sender in the ring, 0 is the starter.
        n_nodes: length of the ring.
        placement: hash of model, cut and ring that all nodes of a run share.
        name, process: the sender's name, and a number that its process drew; its address may change.
        extensions: for later versions; "wire" is the number format of the run's rows, if not "auto" (net.wire.WIRE_DTYPES);
            "reconnect" and "received" are for a connection that replaces a broken one (net.reconnect).
    """

    index: Whole
    n_nodes: Whole
    placement: Text
    name: Text = ""
    process: Text = ""
    extensions: dict[str, Any] = field(default_factory=dict)

    @property
    def wire(self) -> str:
        """Number type of the sender's rows: an entry of WIRE_DTYPES, if it is one of ours."""
        return str(self.extensions.get("wire", "auto"))

    @property
    def reconnect(self) -> int:
        """How often the sender has called again in this run, this call included; 0 in the first handshake."""
        return self._number("reconnect") or 0

    @property
    def received(self) -> int | None:
        """Number of the last BATCH frame that the sender had from the receiver, if it had any."""
        return self._number("received")

    def _number(self, key: str) -> int | None:
        value = self.extensions.get(key)
        return value if type(value) is int and value >= 0 else None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Hello:
        return decode_text(cls, bytes(data), "a HELLO", WireError)


@dataclass(frozen=True)
class Fault:
    """Payload of an ERROR frame: which node failed and how, in words and as a code.

    Attributes:
        node: the node that is lost or failed; "" if it is not known.
        message: one line for a person.
        reporter: the node that noticed.
        code: "lost" if the node is silent, else that of its error (see mdi.errors).
    """

    node: str
    message: str
    reporter: str
    code: str = "lost"

    def to_bytes(self) -> bytes:
        # A character takes up to 6 bytes (an escaped control character); the whole must stay under the 4096 that a
        # handshake accepts.
        short = Fault(self.node[:40], self.message[:500], self.reporter[:40], self.code[:20])
        return json.dumps(asdict(short), ensure_ascii=False).encode("utf-8", "replace")

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Fault:
        try:
            fields = json.loads(bytes(data))
            return cls(*(one_line(fields[key]) for key in ("node", "message", "reporter", "code")))
        except (ValueError, KeyError, TypeError, RecursionError):
            return cls("", "an error report that cannot be read", "", "wire")
