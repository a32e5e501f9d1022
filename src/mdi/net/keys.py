"""The cluster key: a secret of 32 bytes in a file of every node; and messages of two nodes that have it, sealed with its help.

A file may hold several keys, one a line: the first one signs, all verify. So a key is changed without an end of anything:
a new one is added to the file of every node, then it becomes the first in each, then the old one is dropped.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import itertools
import logging
import os
import platform
import secrets
import sys
import threading
from pathlib import Path

from mdi.errors import UsageError, WireError

PREFIX = "mdi-key-1"
SECRET_BYTES = 32
N_KEYS_LIMIT = 8
FILE_LIMIT_BYTES = 4096

logger = logging.getLogger("mdi")


def mac(secret: bytes, label: str, *parts: bytes) -> bytes:
    """32 bytes that only an owner of the secret can make: HMAC-SHA256 over the label and the parts, each with its length."""
    made = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (label.encode(), *parts):
        made.update(len(part).to_bytes(8, "little") + part)
    return made.digest()


def key_of(found: bytes, keys: tuple[bytes, ...], label: str, *parts: bytes) -> bytes | None:
    """The key that `mac` made `found` with; None if it is none of these."""
    fitting = [secret for secret in keys if hmac.compare_digest(found, mac(secret, label, *parts))]
    return fitting[0] if fitting else None


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def text_of(keys: tuple[bytes, ...]) -> str:
    """The text of a key file."""
    return "".join(f"{PREFIX} {base64.urlsafe_b64encode(secret).decode()}\n" for secret in keys)


def parse_keys(text: str, where: str) -> tuple[bytes, ...]:
    """The keys of a key file's text; UsageError names the number of a bad line, never its content."""
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            secret = base64.b64decode(words[1], altchars=b"-_", validate=True) if len(words) == 2 else b""
        except (ValueError, binascii.Error):
            secret = b""
        if words[0] != PREFIX or len(secret) != SECRET_BYTES:
            raise UsageError(f"{where}, line {number}: this is not a cluster key; `mdi key FILE` makes a file with one")
        keys.append(secret)
    if not 1 <= len(set(keys)) <= N_KEYS_LIMIT:
        raise UsageError(
            f"{where} holds {len(set(keys))} cluster keys, expected 1 to {N_KEYS_LIMIT}: see `mdi key --help`"
        )
    return tuple(dict.fromkeys(keys))


def write_keys(path: Path, keys: tuple[bytes, ...], replaces: bool = True) -> None:
    """Write a key file that only its owner can read; it appears whole or not at all. UsageError says why not.

    One that is there keeps its owner: a service may read it, and root change it.

    Args:
        replaces: False: one that is there stays as it is, also if another process made it just now.
    """
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text_of(keys).encode())
                if path.exists() and hasattr(os, "chown"):
                    before, made = path.stat(), os.fstat(file.fileno())
                    if (before.st_uid, before.st_gid) != (made.st_uid, made.st_gid):
                        os.chown(file.fileno(), before.st_uid, before.st_gid)
                file.flush()
                os.fsync(file.fileno())
            if replaces:
                os.replace(new, path)
            else:
                _name_if_free(new, path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror or e}") from None


def _name_if_free(new: Path, path: Path) -> None:
    """Give a file its name, if nobody has given that to another one."""
    try:
        os.link(new, path)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links, on which two processes are not told apart
        if not path.exists():
            os.replace(new, path)


def check_private(path: Path, found: os.stat_result) -> None:
    """UsageError if other users can read a file of keys."""
    if os.name == "posix" and found.st_mode & 0o077:
        raise UsageError(f"others can read the key file {path}: run `chmod 600 {path}`")


class KeyFile:
    """A key file, read again whenever it has changed: so keys change under nodes that run.

    Raises:
        UsageError: it does not exist, has no key, or other users can read it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._seen = self._look()
        self._keys = self._read()
        self._is_told = False

    @property
    def keys(self) -> tuple[bytes, ...]:
        """All keys, the one that signs first. If the file has become unreadable: those that it had before."""
        with self._lock:
            try:
                seen = self._look()
                if seen != self._seen:
                    self._keys = self._read()
                    self._seen, self._is_told = seen, False
                    logger.info("%s has changed: %d cluster keys", self.path, len(self._keys))
            except UsageError as e:
                if not self._is_told:
                    self._is_told = True
                    logger.warning("%s: the earlier keys stay in use", e)
            return self._keys

    @property
    def first(self) -> bytes:
        return self.keys[0]

    def _look(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self.path)
        except OSError as e:
            raise UsageError(
                f"cannot read the key file {self.path}: {e.strerror or e}; `mdi key FILE` makes one, `mdi join` fetches one"
            ) from None
        check_private(self.path, found)
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> tuple[bytes, ...]:
        try:
            with open(self.path, "rb") as file:
                data = file.read(FILE_LIMIT_BYTES + 1)
        except OSError as e:
            raise UsageError(f"cannot read the key file {self.path}: {e.strerror or e}") from None
        if len(data) > FILE_LIMIT_BYTES:
            raise UsageError(f"{self.path} has more than {FILE_LIMIT_BYTES} bytes: it is not a key file")
        return parse_keys(data.decode("utf-8", "replace"), str(self.path))


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
