"""Messages between two nodes after the handshake: encrypted and authenticated, each once and in order.

Each direction has a key of its own, which no other connection ever has, and counts its messages: the count is the nonce. So
a message that was changed, repeated, left out, or sent back to where it came from does not open.
"""

from __future__ import annotations

import functools
import itertools
import platform
import sys
from pathlib import Path

from mdi.errors import WireError

TAG_BYTES = 16
KEY_BYTES = 32


@functools.cache
def has_fast_aes() -> bool:
    """Whether the processor computes AES itself; without, ChaCha20 is faster, and takes the same time for all data."""
    if sys.platform == "linux":
        try:
            return " aes" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
    return platform.machine().lower() in ("x86_64", "amd64", "arm64", "aarch64")


class SealedSession:
    """Both directions of one connection. One thread at a time may open; `seal` is safe in the order of its calls.

    Args:
        send_key, read_key: of KEY_BYTES each.
        is_aes: AES-256-GCM, else ChaCha20-Poly1305; the same on both sides.
    """

    def __init__(self, send_key: bytes, read_key: bytes, is_aes: bool) -> None:
        from cryptography.exceptions import InvalidTag  # here: see challenge
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

        self._broken = InvalidTag
        cipher = AESGCM if is_aes else ChaCha20Poly1305
        self._send, self._read = cipher(send_key), cipher(read_key)
        self._sent = itertools.count()  # taken from it at once, so that no number is ever used twice
        self._n_read = 0

    def seal(self, data: bytes) -> bytes:
        """The next message, TAG_BYTES longer than `data`."""
        return self._send.encrypt(_nonce(next(self._sent)), data, None)

    def open(self, sealed: bytes | bytearray | memoryview, into: bytearray | memoryview) -> None:
        """The next message that was read, written to `into`, which is TAG_BYTES shorter. WireError if it is not that one."""
        try:
            self._read.decrypt_into(_nonce(self._n_read), sealed, None, into)
        except self._broken:
            raise WireError("a frame was changed, repeated, left out, or made by somebody else") from None
        self._n_read += 1


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")
