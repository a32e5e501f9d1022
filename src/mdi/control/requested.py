"""What a starter asks a node to compute with: device, types, threads, formats. Stdlib only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

from mdi.json_fields import Fields
from mdi.kernels.page_sizes import CACHE_TYPES
from mdi.net.wire import WIRE_DTYPES

KV_DTYPES = ("auto", *CACHE_TYPES)
N_THREADS_LIMIT = 4096

T = TypeVar("T")


def _asked(default: T, read: Callable[[Fields, str], Any]) -> T:
    """A field; `read` checks one that came as JSON."""
    found: T = field(default=default, metadata={"read": read})
    return found


@dataclass(frozen=True, kw_only=True)
class Requested:
    """One value everywhere: from flags of the same names to the starter's options, requests, and a node's own choices.

    None and "auto" leave the choice to the node. What has been decided is a `machine.computing.Computing`.

    Attributes:
        device, threads: as in the nodes file; what a node was started with overrides them.
        dtype: of the rows; kv_dtype: of caches; wire_dtype: what rows travel as, the same on all nodes (net.wire).
        quantize, quantize_head: weight formats of blocks and of head and embedding, see weight_formats.
        compile: whether torch compiles the blocks' MLPs.
        allow_clipping: whether weights that are too large for their format are clipped instead of refused.
    """

    device: str | None = _asked(None, Fields.text)
    dtype: str | None = _asked(None, Fields.text)
    threads: int | None = _asked(None, partial(Fields.integer, low=1, high=N_THREADS_LIMIT))
    quantize: str | None = _asked(None, Fields.text)
    quantize_head: str | None = _asked(None, Fields.text)
    kv_dtype: str = _asked("auto", partial(Fields.choice, allowed=KV_DTYPES))
    wire_dtype: str = _asked("auto", partial(Fields.choice, allowed=WIRE_DTYPES))
    compile: bool = _asked(False, Fields.boolean)
    allow_clipping: bool = _asked(False, Fields.boolean)

    @staticmethod
    def of(source: Any) -> Requested:
        """What an object's attributes of these names say: flags, options, a request."""
        found: dict[str, Any] = {f.name: getattr(source, f.name, f.default) for f in fields(Requested)}
        return Requested(**found)

    @staticmethod
    def read(get: Fields) -> dict[str, Any]:
        """The values of a request in JSON, each checked."""
        found = {}
        for f in fields(Requested):
            read = partial(f.metadata["read"], get)
            found[f.name] = get.optional(f.name, read) if f.default is None else read(f.name)
        return found

    def over(self, other: Requested) -> Requested:
        """These choices, completed by those of `other`."""
        chosen = {name: value for name, value in vars(Requested.of(self)).items() if value != getattr(ANYTHING, name)}
        return replace(Requested.of(other), **chosen)


ANYTHING = Requested()
