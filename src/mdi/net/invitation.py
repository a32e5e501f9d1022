"""An invitation: its code gives the cluster key to as many machines as it is for, within 15 minutes.

The code has 80 random bits, too many to guess, even for an attacker who has recorded or relayed the exchange. Both sides draw
a public value (X25519). The guest sends its value with a proof that needs the code. The key file's text comes back encrypted
with a key from the two values and the code, so that nobody in between can read or change it.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from mdi.errors import AccessError, UsageError
from mdi.net.hello import public_bytes, shared_key
from mdi.net.keys import KEY_BYTES, mac

VALID_S = 900.0
_CODE_BYTES = 10
_GROUP = 4
_NONCE = bytes(12)  # the key is used for one message
_ASK, _GIVE = "mdi join", b"mdi join answer"
_NODE = "mdi join node"
_NAME_LIMIT = 40


def new_code() -> str:
    """Such as "QX2M-7RTA-....": 16 letters and digits, in groups."""
    text = base64.b32encode(secrets.token_bytes(_CODE_BYTES)).decode()
    return "-".join(text[i : i + _GROUP] for i in range(0, len(text), _GROUP))


def code_bytes(code: str) -> bytes:
    """The random bits of a code, however it was typed. Raises UsageError if it is none."""
    text = "".join(c for c in code.upper() if c.isalnum()).replace("0", "O").replace("1", "I").replace("8", "B")
    try:
        data = base64.b32decode(text)
    except ValueError:
        data = b""
    if len(data) != _CODE_BYTES:
        raise UsageError(
            "this is not the code of an invitation: a code has 16 letters and digits, like ABCD-EFGH-IJKL-MNOP"
        )
    return data


@dataclass(frozen=True)
class GuestNode:
    """Where the node of a guest will be: a name for people, its address, its control port and its ring port."""

    name: str
    addr: str
    port: int
    ring_port: int

    def proof(self, secret: bytes, public: bytes) -> str:
        """Proof that the sender has the code."""
        fields = (self.name, self.addr, str(self.port), str(self.ring_port))
        return mac(secret, _NODE, public, *(field.encode() for field in fields)).hex()

    @classmethod
    def read(cls, request: Any, secret: bytes, public: bytes) -> GuestNode | None:
        """Read where a guest will be from its request; None if that is missing, nonsense, or not proved."""
        try:
            given = request["node"]
            node = cls(str(given["name"]), str(ipaddress.ip_address(given["addr"])), given["port"], given["ring_port"])
            proof = str(request["node_proof"])
        except (KeyError, TypeError, ValueError):
            return None
        is_readable = len(node.name) <= _NAME_LIMIT and all(
            type(port) is int and 0 < port < 65536 for port in (node.port, node.ring_port)
        )
        if not is_readable or not hmac.compare_digest(proof.encode(), node.proof(secret, public).encode()):
            return None
        return node


class Invitation:
    """The side that has the key. `code` is for the guests, who get `content`.

    Args:
        clock: seconds, rising.
        n_guests: how many may use it.
        on_guest: called with the node of each guest that says where it will be, and the address that it asked from.

    Attributes:
        used: set with the first use.
    """

    def __init__(
        self, content: bytes, clock: Callable[[], float] = time.monotonic, n_guests: int = 1,
        on_guest: Callable[[GuestNode, str], None] = lambda node, addr: None,
    ) -> None:  # fmt: skip
        self.code = new_code()
        self._secret = code_bytes(self.code)
        self._content = content
        self._clock = clock
        self._end = clock() + VALID_S
        self._lock = threading.Lock()
        self.n_left = n_guests
        self._known: set[bytes] = set()  # values of the guests, so that a recorded request uses up nothing
        self._on_guest = on_guest
        self.used = threading.Event()

    @property
    def is_over(self) -> bool:
        return self.n_left == 0 or self._clock() > self._end

    def answer(self, request: Any, addr: str = "") -> dict[str, str]:
        """Make the answer to a guest, which uses the invitation. Raises AccessError: a wrong code, or too late.

        Args:
            addr: from which the request came.
        """
        public, proof = _two(request, "public", "proof")
        if not hmac.compare_digest(proof, mac(self._secret, _ASK, public)):
            raise AccessError("this is not the code of the invitation")
        private = X25519PrivateKey.generate()
        mine = public_bytes(private)
        key = shared_key(private, public, self._secret, _GIVE + public + mine, KEY_BYTES)
        with self._lock:
            if self.is_over:
                raise AccessError(
                    "the invitation has been used, or is older than 15 minutes: `mdi key --invite` makes another"
                )
            if public in self._known:
                raise AccessError("this request has been answered already: a guest draws a new value each time")
            self._known.add(public)
            self.n_left -= 1
        guest = GuestNode.read(request, self._secret, public)
        self.used.set()
        if guest is not None:
            self._on_guest(guest, addr)
        return {"public": mine.hex(), "sealed": ChaCha20Poly1305(key).encrypt(_NONCE, self._content, None).hex()}


class Invitations:
    """An invitation for several machines, and a new one when it has become too old.

    Args:
        on_code: called with each new code.
        n_boards: how many may join.
        on_guest: see Invitation.
    """

    def __init__(
        self, content: bytes, on_code: Callable[[str], None], n_boards: int,
        clock: Callable[[], float] = time.monotonic, on_guest: Callable[[GuestNode, str], None] = lambda node, addr: None,
    ) -> None:  # fmt: skip
        self._content, self._on_code, self._clock, self._on_guest = content, on_code, clock, on_guest
        self._current = self._made(n_boards)

    def answer(self, request: Any, addr: str = "") -> dict[str, str]:
        return self._current.answer(request, addr)

    def renew(self) -> None:
        """Replace a code that has become too old, if more machines may join."""
        if self._current.n_left > 0 and self._current.is_over:
            self._current = self._made(self._current.n_left)

    def _made(self, n_boards: int) -> Invitation:
        invitation = Invitation(self._content, self._clock, n_boards, self._on_guest)
        self._on_code(invitation.code)
        return invitation


class Guest:
    """The side that has the code. Raises UsageError if it is not a valid code.

    Args:
        node: where its node will be, for a host that waits for it.
    """

    def __init__(self, code: str, node: GuestNode | None = None) -> None:
        self._secret = code_bytes(code)
        self._node = node
        self._private = X25519PrivateKey.generate()
        self._public = public_bytes(self._private)

    @property
    def request(self) -> dict[str, Any]:
        request = {"public": self._public.hex(), "proof": mac(self._secret, _ASK, self._public).hex()}
        if self._node is None:
            return request
        return {**request, "node": asdict(self._node), "node_proof": self._node.proof(self._secret, self._public)}

    def open(self, answer: Any) -> bytes:
        """The content. Raises AccessError if the answer was not made with the code."""
        public, sealed = _two(answer, "public", "sealed")
        key = shared_key(self._private, public, self._secret, _GIVE + self._public + public, KEY_BYTES)
        try:
            return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, None)
        except InvalidTag:
            raise AccessError("the node there does not know the code") from None


def _two(data: Any, *names: str) -> tuple[bytes, bytes]:
    try:
        first, second = (bytes.fromhex(data[name]) for name in names)
    except (KeyError, TypeError, ValueError):
        raise AccessError("a message of a join that cannot be read") from None
    if len(first) != 32:
        raise AccessError("a message of a join that cannot be read")
    return first, second
