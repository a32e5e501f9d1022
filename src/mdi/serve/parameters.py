"""Fields of a request, checked one by one. Unknown fields are ignored, as in other servers, unless they are misspelt."""

from __future__ import annotations

import difflib
import itertools
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mdi.serve.api_errors import ApiError, invalid

MOST_CHOICES = 32
MOST_STOPS = 16
LONGEST_STOP = 4096  # characters; each new token is compared with the beginnings of all of them
MOST_TOP_LOGPROBS = 20
ALIKE = 0.85  # of two names; with it, no field that other servers have is taken for one of this server's ...
OF_OTHERS = ("mode", "models", "repetition_penalty_range")  # ... but these
MOST_COMPARED = 64  # unknown fields; with thousands of them, other requests would wait
_MISSING = object()


@dataclass(frozen=True)
class Sampling:
    """How texts are continued: the fields of `mdi.engine.sequence.SamplingParams` that a request says, as plain JSON."""

    values: dict[str, Any]
    seed: int


@dataclass(frozen=True)
class CommonFields:
    """What completions and chats have in common.

    Attributes:
        n_tokens: None as many as the context holds.
        grammar: {"type": "json"}, {"type": "schema", "schema": ...}; None is any text.
        deadline_s: the whole request must be done by then; None any time.
    """

    model: str
    n: int
    n_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    n_logprobs: int | None
    is_streamed: bool
    with_usage: bool
    grammar: Mapping[str, Any] | None = None
    deadline_s: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class RequestFields:
    """The values of a JSON object, by name and type. It knows a name once that was asked for."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object", "invalid_body")
        self._body = body
        self._read: set[str] = set()

    def raw(self, name: str) -> Any:
        """None if it is not there."""
        self._read.add(name)
        return self._body.get(name)

    def check_spelling(self) -> None:
        """Raises ApiError if a field has a value, and almost the name of one that was asked for. Call it after the others."""
        known = {_plain(name): name for name in sorted(self._read)}
        given = (name for name, value in self._body.items() if value is not None)
        unknown = (name for name in given if name not in self._read and name not in OF_OTHERS)
        for name in itertools.islice(unknown, MOST_COMPARED):
            near = difflib.get_close_matches(_plain(name[:100]), list(known), 1, ALIKE)
            if near:
                raise ApiError(
                    400, f"{name[:100]}: unknown field; is {known[near[0]]} meant?", "unknown_field", name[:100]
                )

    def number(self, name: str, default: float, low: float, high: float, is_open: bool = False) -> float:
        """From `low` to `high`; with `is_open`, `low` itself is not among them."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(name, f"expected a number, got {_shown(value)}")
        if not low <= value <= high or (is_open and value == low):
            beyond = "over" if is_open else "from"
            raise invalid(name, f"expected a number {beyond} {low:g} to {high:g}, got {_shown(value)}")
        return float(value)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(name, f"expected a whole number, got {_shown(value)}")
        if not low <= value <= high:
            raise invalid(name, f"expected a whole number from {low} to {high}, got {_shown(value)}")
        return value

    def flag(self, name: str) -> bool:
        value = self.raw(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise invalid(name, f"expected true or false, got {_shown(value)}")
        return value

    def text(self, name: str, default: Any = _MISSING) -> str:
        value = self.raw(name)
        if value is None and default is not _MISSING:
            return str(default)
        if not isinstance(value, str):
            raise invalid(name, f"expected a text, got {_shown(value)}")
        return checked_text(name, value)

    def mapping(self, name: str) -> dict[str, Any]:
        """{} if it is not there."""
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise invalid(name, f"expected an object, got {_shown(value)}")
        return value


def common_fields(fields: RequestFields, n_tokens: int | None, n_logprobs: int | None) -> CommonFields:
    """Raises ApiError, which names the field.

    Args:
        n_tokens: where the request does not say it.
        n_logprobs: top tokens whose probability is wanted; None if none are.
    """
    limits = [fields.integer(name, None, 1, 1 << 31) for name in ("max_completion_tokens", "max_tokens")]
    options = RequestFields(fields.mapping("stream_options"))
    best_of = fields.integer("best_of", None, 1, MOST_CHOICES)
    n = fields.integer("n", 1, 1, MOST_CHOICES) or 1
    if best_of not in (None, n):
        raise invalid("best_of", "only the value of n is supported")
    deadline = fields.number("deadline_s", 0.0, 0.0, 86400.0)
    return CommonFields(
        model=fields.text("model", ""),
        n=n,
        n_tokens=limits[0] or limits[1] or n_tokens,
        sampling=_sampling(fields, n_logprobs),
        stop=_stop(fields.raw("stop")),
        n_logprobs=n_logprobs,
        is_streamed=fields.flag("stream"),
        with_usage=options.flag("include_usage"),
        grammar=_grammar(fields.mapping("response_format")),
        deadline_s=deadline or None,
    )


def _sampling(fields: RequestFields, n_logprobs: int | None) -> Sampling:
    top_k = fields.integer("top_k", None, -1, 1 << 31)
    seed = fields.integer("seed", None, -(1 << 63), (1 << 64) - 1)
    values = {
        "temperature": fields.number("temperature", 1.0, 0.0, 2.0),
        "top_p": fields.number("top_p", 1.0, 0.0, 1.0, is_open=True),
        "top_k": top_k if top_k is not None and top_k > 0 else None,
        "min_p": fields.number("min_p", 0.0, 0.0, 1.0),
        "presence_penalty": fields.number("presence_penalty", 0.0, -2.0, 2.0),
        "frequency_penalty": fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        "repetition_penalty": fields.number("repetition_penalty", 1.0, 0.0, 10.0, is_open=True),
        "logit_bias": _logit_bias(fields.mapping("logit_bias")),
        "n_logprobs": n_logprobs,
    }
    return Sampling(values, secrets.randbits(63) if seed is None else seed)


def _logit_bias(given: Mapping[str, Any]) -> list[tuple[int, float]]:
    if len(given) > 1024:
        raise invalid("logit_bias", "more than 1024 tokens")
    found = []
    for token, value in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise invalid("logit_bias", f"expected token ids as keys, got {_shown(token)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise invalid("logit_bias", f"expected numbers from -100 to 100, got {_shown(value)}")
        found.append((int(token), float(value)))
    return found


def _stop(value: Any) -> tuple[str, ...]:
    given = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(one, str) and one for one in given):
        raise invalid("stop", "expected a text, or a list of texts that are not empty")
    if len(given) > MOST_STOPS:
        raise invalid("stop", f"at most {MOST_STOPS} are supported")
    if any(len(one) > LONGEST_STOP for one in given):
        raise invalid("stop", f"at most {LONGEST_STOP} characters each are supported")
    return tuple(checked_text("stop", one) for one in given)


def _grammar(form: Mapping[str, Any]) -> dict[str, Any] | None:
    wanted = form.get("type", "text")
    if wanted == "text":
        return None
    if wanted == "json_object":
        return {"type": "schema", "schema": {"type": "object"}}
    if wanted == "json_schema":
        inner = form.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict):
            raise invalid("response_format", "json_schema needs an object `schema`")
        return {"type": "schema", "schema": schema}
    raise invalid("response_format", f"expected type text, json_object or json_schema, got {_shown(wanted)}")


def checked_text(name: str, text: str) -> str:
    """Raises ApiError if a text holds half of a pair of surrogates, which JSON can say and no text has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(name, "not valid Unicode: half of a surrogate pair") from None
    return text


def _plain(name: str) -> str:
    """maxTokens, max-tokens and max_tokens are one name."""
    return name.lower().replace("_", "").replace("-", "")


def _shown(value: Any) -> str:
    return repr(value)[:60]
