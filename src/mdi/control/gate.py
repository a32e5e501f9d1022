"""Lets only owners of the cluster key ask a node for more than its name. Decides before a body is read."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mdi.control.signing import (
    BODY_HEADER,
    NONCE_HEADER,
    SIGNATURE_HEADER,
    NoncesGiven,
    body_hash,
    key_of_request,
    sign_answer,
)
from mdi.errors import AccessError, ControlError
from mdi.net.keys import KeyFile

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
            raise ControlError("the body is not that of the signature", 401, code=AccessError.code)


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
            raise ControlError("this nonce has expired: use the one in this answer", 401, code="nonce")
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
        return ControlError(f"{why}: start both with the same --key FILE", 401, code=AccessError.code)

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
    """What a node tells strangers of itself."""
    return {key: status[key] for key in PUBLIC}
