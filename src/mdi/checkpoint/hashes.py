"""Hashes of a model's parts, computed once and kept in memory or in a file beside the weights.

Knows nothing of what is hashed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mdi.checkpoint.kept_json import read_kept, write_kept
from mdi.checkpoint.parts import PartInfo

FORMAT_VERSION = 2  # also of what the packed forms of a part are

_SHA256 = re.compile(r"[0-9a-f]{64}")


class PartHashes:
    """Hashes by form and part, in memory."""

    def __init__(self) -> None:
        self._infos: dict[str, dict[str, PartInfo]] = {}

    def get(self, form: str, part: str) -> PartInfo | None:
        """The part's hash in one form: "stored", the name of a type that weights are cast to, or what they are packed in."""
        return self._infos.get(form, {}).get(part)

    def put(self, form: str, info: PartInfo) -> None:
        self._infos.setdefault(form, {})[info.name] = info


class HashCache(PartHashes):
    """`parts.json`: valid as long as size and time of the weight file are those it was made for.

    Args:
        path: of the cache.
        weights: the weight file whose parts they are.
        config_hash: of the model.
    """

    def __init__(self, path: Path, weights: Path, config_hash: str) -> None:
        super().__init__()
        self._path = path
        stat = weights.stat()
        self._stamp = {
            "format_version": FORMAT_VERSION,
            "file": weights.name,
            "n_bytes": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "config_hash": config_hash,
        }
        self._infos = read_kept(path, self._taken, {})

    def put(self, form: str, info: PartInfo) -> None:
        if self.get(form, info.name) != info:
            super().put(form, info)
            self._write()

    def _taken(self, data: Any) -> dict[str, dict[str, PartInfo]]:
        if {key: data[key] for key in self._stamp} != self._stamp:
            return {}
        return {
            form: {name: _info(name, entry) for name, entry in entries.items()}
            for form, entries in data["parts"].items()
        }

    def _write(self) -> None:
        parts = {
            form: {name: [info.sha256, info.n_bytes] for name, info in infos.items()}
            for form, infos in self._infos.items()
        }
        write_kept(self._path, {**self._stamp, "parts": parts})


def _info(name: str, entry: Any) -> PartInfo:
    sha256, n_bytes = entry
    if not _SHA256.fullmatch(sha256) or type(n_bytes) is not int:
        raise ValueError("not a hash")
    return PartInfo(name, sha256, n_bytes)
