"""Key files for tests."""

from __future__ import annotations

from pathlib import Path

from mdi.net.keys import KeyFile, new_secret, write_keys


def key_file(path: Path, *secrets: bytes) -> KeyFile:
    """A file with these keys, or with a new one."""
    write_keys(path, secrets or (new_secret(),))
    return KeyFile(path)
