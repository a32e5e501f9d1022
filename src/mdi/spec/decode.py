"""Reads declared values (dataclasses, with limits as `msgspec.Meta`) from JSON of a file, a peer or a user."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import threading
from collections.abc import Callable, Collection, Mapping
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
ShortName = Annotated[str, Meta(min_length=1, max_length=80)]
FormatText = Annotated[str, Meta(min_length=1, max_length=20_000)]  # see mdi.kernels.format_maps
Whole = Annotated[int, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
Port = Annotated[int, Meta(ge=1, le=65535)]
RunId = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Number = Annotated[float, Meta(ge=0, le=1e300)]  # finite
Positive = Annotated[float, Meta(gt=0, le=1e300)]
Span = tuple[Whole, Whole]  # [start, stop)


_WORDS = {
    "int": "a whole number", "float": "a number", "str": "a string", "bool": "true or false", "array": "a list",
    "object": "an object",
}  # fmt: skip


def one_of(choices: Collection[str]) -> Meta:
    """A text that is one of these."""
    return Meta(pattern=f"^({'|'.join(map(re.escape, choices))})\\Z")


_known: set[Any] = set()
_learning = threading.Lock()


def converted(data: Any, type: type[T]) -> T:
    """As `msgspec.convert`, which ends the process (0.22) if two threads use it for the same new type at the same time."""
    import msgspec

    if type not in _known:
        with _learning:
            with contextlib.suppress(msgspec.ValidationError):
                msgspec.convert(None, type)
            _known.add(type)
    return msgspec.convert(data, type, strict=True)


def decode(type: type[T], data: Any, where: str, error: Callable[[str], MdiError]) -> T:
    """The value of a type from what `json.loads` made.

    Args:
        where: names the value in errors, such as "request"; fields follow after a dot. "nodes.json:" is all of a file.
        error: makes the error of a message: UsageError where a person wrote the file, ControlError for a peer.

    Raises:
        MdiError: of `error`; names the field that is missing or wrong.
    """
    import msgspec

    try:
        return converted(data, type)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as e:  # ValueError: half a character
        message, _, path = str(e).partition(" - at `$")
        path = path.rstrip("`")
        spot = f"{where} {path.removeprefix('.')}" if where.endswith(":") and path else where.removesuffix(":") + path
        raise error(f"{spot}: {_in_words(message[:300], data, path)}") from None


def _in_words(message: str, data: Any, path: str) -> str:
    """A message of msgspec in plain words: "expected a whole number, found 'x'"."""
    message = re.sub(r"^Object missing required field `(\w+)`", r"the field '\1' is missing", message)
    if not message.startswith("Expected"):
        return message
    wanted, _, _ = message.replace("Expected", "expected", 1).partition(", got ")
    wanted = re.sub(r"`([\w |]+)`", lambda m: " or ".join(_WORDS.get(word, word) for word in m[1].split(" | ")), wanted)
    if "[...]" in path:  # a key or a value of any name
        return wanted
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        data = data[name] if name else data[int(index)]
    return f"{wanted}, found {shown(data)}"


def decode_text(type: type[T], text: str | bytes, where: str, error: Callable[[str], MdiError]) -> T:
    """The same of JSON that has not been read yet."""
    return decode(type, parsed(text, where, error), where, error)


def parsed(
    text: str | bytes, where: str, error: Callable[[str], MdiError], parse_float: Callable[[str], Any] = float
) -> Any:
    """Any JSON. Raises `error` if it is none."""
    try:
        return json.loads(text, parse_float=parse_float)
    except (ValueError, RecursionError) as e:  # also a number with thousands of digits, and brackets without end
        raise error(f"{where} is not valid JSON: {str(e)[:200]}") from None


def only_fields_of(cls: Any, data: Mapping[str, Any], where: str, error: Callable[[str], MdiError]) -> None:
    """Refuse names that a dataclass does not have, which are a person's mistakes."""
    names = [field.name for field in dataclasses.fields(cls)]
    for name in data:
        if name not in names:
            raise error(f"{where}: unknown field {shown(name)}; expected {', '.join(names)}")


def shown(value: Any) -> str:
    """A JSON value for an error message. Nested values are shown without their content, which may be endless."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Collection) and not isinstance(value, (str, bytes)):
        return str(list(value)) if 0 < len(value) <= 4 and all(type(v) in (int, float) for v in value) else "a list"
    if isinstance(value, int) and abs(value) > 1 << 64:
        return "a number without bounds"  # to write it out may take long, and Python may refuse to
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def spans_rise(where: str, error: Callable[[str], MdiError], **spans: Span) -> None:
    """Raises `error` for a span that ends before it starts."""
    for name, (start, stop) in spans.items():
        if start > stop:
            raise error(f"{where}.{name}: expected [start, stop] with start <= stop, got {[start, stop]}")
