"""Reads declared values (dataclasses, with limits as `msgspec.Meta`) from JSON of a file, a peer or a user."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Annotated, Any, TypeVar

from mdi.errors import MdiError

try:
    from msgspec import Meta
except ModuleNotFoundError:  # `--help` needs no library; what is missing is said by a run

    class Meta:  # type: ignore[no-redef]
        def __init__(self, **limits: Any) -> None:
            self.ge = self.gt = self.le = None
            vars(self).update(limits)


T = TypeVar("T")

Text = Annotated[str, Meta(max_length=1000)]
Name = Annotated[str, Meta(min_length=1, max_length=1000)]
Whole = Annotated[int, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
Port = Annotated[int, Meta(ge=1, le=65535)]
RunId = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Number = Annotated[float, Meta(ge=0, le=1e300)]  # finite
Span = tuple[Whole, Whole]  # [start, stop)


def one_of(choices: Collection[str]) -> Meta:
    """A text that is one of these."""
    return Meta(pattern=f"^({'|'.join(map(re.escape, choices))})\\Z")


def decode(type: type[T], data: Any, where: str, error: Callable[[str], MdiError]) -> T:
    """The value of a type from what `json.loads` made.

    Args:
        where: names the value in errors, such as "request"; fields follow after a dot.
        error: makes the error of a message: UsageError where a person wrote the file, ControlError for a peer.

    Raises:
        MdiError: of `error`; names the field that is missing or wrong.
    """
    import msgspec

    try:
        return msgspec.convert(data, type, strict=True)
    except (msgspec.ValidationError, OverflowError, RecursionError) as e:
        message, _, path = str(e).partition(" - at `$")
        raise error(f"{where}{path.rstrip('`')}: {message[:300].replace('Expected', 'expected', 1)}") from None


def spans_rise(where: str, error: Callable[[str], MdiError], **spans: Span) -> None:
    """Raises `error` for a span that ends before it starts."""
    for name, (start, stop) in spans.items():
        if start > stop:
            raise error(f"{where}.{name}: expected [start, stop] with start <= stop, got {[start, stop]}")
