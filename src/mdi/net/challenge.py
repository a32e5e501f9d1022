"""Two nodes prove to each other that both have a cluster key, and derive the keys of their session.

Each sends a public value that it drew for this connection, with a code that only who has a cluster key can make: the caller's
over its own value, the answer's over both. The keys of the session follow from the secret that the two values make (X25519),
the cluster key, and both messages. So a recorded connection cannot be played again, nor be read by who steals the key later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mdi.errors import AccessError
from mdi.net.keys import key_of, mac
from mdi.net.sealing import KEY_BYTES, SealedSession, has_fast_aes

if TYPE_CHECKING:  # the library takes 6 MB of memory, which a node without a key can do without
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

PUBLIC_BYTES = 32
MAC_BYTES = 32
CHALLENGE_BYTES = 1 + PUBLIC_BYTES + MAC_BYTES  # 1 if the processor computes AES itself; public value; code
_CALL, _ANSWER, _SESSION = "mdi call", "mdi answer", b"mdi session"


class Caller:
    """The side that connects. It sends `call`."""

    def __init__(self, keys: tuple[bytes, ...]) -> None:
        self._secret = keys[0]
        self._private = _new_private()
        open_part = bytes([has_fast_aes()]) + public_bytes(self._private)
        self.call = open_part + mac(self._secret, _CALL, open_part)

    def session(self, answer: bytes) -> SealedSession:
        """Raises AccessError if the answer was not made with the same key."""
        open_part = _open_part(answer)
        if key_of(answer[len(open_part) :], (self._secret,), _ANSWER, self.call, open_part) is None:
            raise AccessError("the node there does not have this cluster key")
        mine, theirs = _session_keys(self._private, self._secret, open_part[1:], self.call + answer)
        return SealedSession(mine, theirs, bool(self.call[0] and answer[0]))


def answer_to(call: bytes, keys: tuple[bytes, ...]) -> tuple[bytes, SealedSession]:
    """The answer of the side that was called, and its session. Raises AccessError if the caller has none of these keys."""
    open_part = _open_part(call)
    secret = key_of(call[len(open_part) :], keys, _CALL, open_part)
    if secret is None:
        raise AccessError("it has another cluster key")
    private = _new_private()
    mine = bytes([has_fast_aes()]) + public_bytes(private)
    answer = mine + mac(secret, _ANSWER, call, mine)
    theirs_key, mine_key = _session_keys(private, secret, open_part[1:], call + answer)
    return answer, SealedSession(mine_key, theirs_key, bool(call[0] and answer[0]))


def _new_private() -> X25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate()


def public_bytes(private: X25519PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()


def shared_key(private: X25519PrivateKey, public: bytes, secret: bytes, info: bytes, n_bytes: int) -> bytes:
    """Key material that only the two sides have. Raises AccessError for a public value that no honest side draws."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise AccessError("an invalid public value") from None
    return HKDF(SHA256(), n_bytes, salt=secret, info=info).derive(shared)


def _session_keys(private: X25519PrivateKey, secret: bytes, public: bytes, messages: bytes) -> tuple[bytes, bytes]:
    """Of the caller's direction, and of the other."""
    made = shared_key(private, public, secret, _SESSION + messages, 2 * KEY_BYTES)
    return made[:KEY_BYTES], made[KEY_BYTES:]


def _open_part(message: bytes) -> bytes:
    if len(message) != CHALLENGE_BYTES or message[0] > 1:
        raise AccessError("a challenge that cannot be read")
    return message[: 1 + PUBLIC_BYTES]
