"""Signed control requests and answers of nodes with a cluster key, and the gate that checks them before a body is read.

A node gives out nonces, with every answer and to anybody, and takes each once, for a while by its own clock: boards have no
others. The starter signs method, address, hash of the body, and the nonce; the node signs its answer to it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mdi.errors import Code, ControlError
from mdi.net.keys import KeyFile, key_of, mac

NONCE_HEADER = "Mdi-Nonce"
SIGNATURE_HEADER = "Mdi-Signature"
BODY_HEADER = "Mdi-Body"
NONCE_S = 120.0  # as long as a node takes a nonce that it gave out
N_NONCES_KEPT = 4


def body_hash(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def sign_request(secret: bytes, method: str, target: str, body: str, nonce: str) -> str:
    return mac(secret, "mdi request", *_fields(method, target, body, nonce)).hex()


def key_of_request(
    found: str, keys: tuple[bytes, ...], method: str, target: str, body: str, nonce: str
) -> bytes | None:
    """The key that signed the request; None if it is none of these."""
    return key_of(_unhex(found), keys, "mdi request", *_fields(method, target, body, nonce))


def sign_answer(secret: bytes, request: str, status: int, body: bytes, next_nonce: str) -> str:
    """`request` is the signature that is answered: so an answer belongs to one request."""
    fields = (request, str(status), body_hash(body), next_nonce)
    return mac(secret, "mdi answer", *(field.encode() for field in fields)).hex()


def is_answer(found: str, secret: bytes, request: str, status: int, body: bytes, next_nonce: str) -> bool:
    return hmac.compare_digest(found.encode(), sign_answer(secret, request, status, body, next_nonce).encode())


class NoncesGiven:
    """The node's side. Nothing is kept of a nonce that was given out, only of those that were used: strangers use none.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self.used: dict[str, float] = {}  # and when it was given out, in the order of use

    def give(self) -> str:
        made = int(self._clock() * 1000).to_bytes(8, "big") + secrets.token_bytes(8)
        return (made + self._code(made)).hex()

    def is_fresh(self, nonce: str) -> bool:
        """Whether it was given out here, not long ago."""
        data = _unhex(nonce)
        if not hmac.compare_digest(data[16:], self._code(data[:16])):
            return False
        return self._clock() - int.from_bytes(data[:8], "big") / 1000 <= NONCE_S

    def use(self, nonce: str) -> bool:
        """Take a fresh one; False if it was used before."""
        now = self._clock()
        with self._lock:
            for old in [n for n, used in self.used.items() if now - used > 2 * NONCE_S]:
                del self.used[old]
            if nonce in self.used:
                return False
            self.used[nonce] = now
            return True

    def _code(self, made: bytes) -> bytes:
        return mac(self._secret, "nonce", made)[:16]


class NoncesKept:
    """The client's side: nonces of one node that are still good."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: deque[tuple[str, float]] = deque(maxlen=N_NONCES_KEPT)

    def keep(self, nonce: str) -> None:
        self._kept.append((nonce, self._clock()))

    def take(self) -> str | None:
        """One that has not been used; None if there is none."""
        while True:
            try:
                nonce, since = self._kept.popleft()
            except IndexError:
                return None
            if self._clock() - since < NONCE_S / 2:
                return nonce


def _fields(method: str, target: str, body: str, nonce: str) -> tuple[bytes, ...]:
    return tuple(field.encode() for field in (method, target, body, nonce))


def _unhex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


QUIET_S = 60.0  # strangers are reported once in this time
PUBLIC = ("name", "version", "state")

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class Asker:
    """Somebody with the key: `secret` signed the request with `signature`, and its body must have the hash `body`."""

    secret: bytes
    signature: str
    body: str

    def check_body(self, body: bytes) -> None:
        """Raises ControlError (401) if this is not the body that was signed."""
        if not hmac.compare_digest(self.body.encode(), body_hash(body).encode()):
            raise ControlError("the body is not that of the signature", 401, code=Code.KEY)


class Gate:
    """Checks requests and signs answers.

    Args:
        keys: of the cluster; None accepts everybody.
        name: of the node.
    """

    def __init__(self, keys: KeyFile | None, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._name = name
        self._clock = clock
        self._nonces = NoncesGiven(clock)
        self._n_refused = 0
        self._last_told = -QUIET_S

    @property
    def is_open(self) -> bool:
        return self._keys is None

    def ask(self, method: str, target: str, headers: Mapping[str, str], addr: str) -> Asker | None:
        """The caller of a signed request; None if it is not signed.

        Raises:
            ControlError (401): it has another key, or its nonce has expired (code "nonce").
        """
        if self._keys is None:
            return None
        signature, nonce = headers.get(SIGNATURE_HEADER, ""), headers.get(NONCE_HEADER, "")
        if not signature:
            return None
        body = headers.get(BODY_HEADER, "")
        secret = key_of_request(signature, self._keys.keys, method, target, body, nonce)
        if secret is None:
            raise self.refusal(addr, f"it has another cluster key than {self._name}")
        if not self._nonces.is_fresh(nonce) or not self._nonces.use(nonce):
            raise ControlError("this nonce has expired: use the one in this answer", 401, code=Code.NONCE)
        return Asker(secret, signature, body)

    def refusal(self, addr: str, why: str = "") -> ControlError:
        """The refusal for a caller without the key; logged from time to time."""
        self._n_refused += 1
        now = self._clock()
        if now - self._last_told >= QUIET_S:
            self._last_told = now
            logger.info(
                "%s refused %d requests without its cluster key; the last came from %s (start both nodes with the same "
                "--key FILE)", self._name, self._n_refused, addr,
            )  # fmt: skip
            self._n_refused = 0
        why = why or f"{self._name} has a cluster key"
        return ControlError(f"{why}: start both with the same --key FILE", 401, code=Code.KEY)

    def headers(self, asker: Asker | None, status: int, body: bytes) -> dict[str, str]:
        """The headers of an answer: a nonce for the next request, and a signature for callers with the key."""
        if self._keys is None:
            return {}
        nonce = self._nonces.give()
        if asker is None:
            return {NONCE_HEADER: nonce}
        return {
            NONCE_HEADER: nonce,
            SIGNATURE_HEADER: sign_answer(asker.secret, asker.signature, status, body, nonce),
        }


def public_status(status: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a node's status that strangers may see."""
    return {key: status[key] for key in PUBLIC}
