"""Fields of a request, declared once. Unknown fields are ignored, as in other servers, unless they are misspelt."""

from __future__ import annotations

import difflib
import itertools
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from mdi.serve.api_errors import ApiError, invalid

MOST_CHOICES = 32
MOST_STOPS = 16
LONGEST_STOP = 4096  # characters; each new token is compared with the beginnings of all of them
MOST_TOP_LOGPROBS = 20
ALIKE = 0.85  # of two names; with it, no field that other servers have is taken for one of this server's ...
OF_OTHERS = ("mode", "models", "repetition_penalty_range")  # ... but these
MOST_COMPARED = 64  # unknown fields; with thousands of them, other requests would wait
_PATH = re.compile(r" - at `\$\.([^`\[]+)[^`]*`$")

Limit = Annotated[int, Meta(ge=1, le=1 << 31)]
Choices = Annotated[int, Meta(ge=1, le=MOST_CHOICES)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MOST_TOP_LOGPROBS)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class RequestFields(msgspec.Struct, kw_only=True):
    """Fields that completions and chats have in common, with OpenAI's defaults; null is a field that is not there."""

    model: str = ""
    n: Choices = 1
    best_of: Choices | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] = -1
    min_p: Share = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] = {}
    seed: int | None = None
    stop: Any = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: dict[str, Any] = {}
    deadline_s: Annotated[float, Meta(ge=0, le=86400)] = 0.0


Fields = TypeVar("Fields", bound=RequestFields)


def read_fields(kind: type[Fields], body: Any) -> Fields:
    """The fields of a request's body. Raises ApiError, which names the one that is wrong."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", "invalid_body")
    given = {name: value for name, value in body.items() if value is not None}
    try:
        fields = msgspec.convert(given, kind)
    except msgspec.ValidationError as e:
        found = _PATH.search(str(e))
        assert found is not None, "the body itself is an object"
        reason = str(e)[: found.start()].replace("`", "")
        raise invalid(found[1], reason[:1].lower() + reason[1:]) from None
    check_spelling(kind, given)
    checked_text("model", fields.model)
    return fields


def check_spelling(kind: type[RequestFields], given: Mapping[str, Any]) -> None:
    """Raises ApiError if a field has almost the name of a known one."""
    known = {_plain(name): name for name in sorted(kind.__struct_fields__)}
    unknown = (name for name in given if name not in kind.__struct_fields__ and name not in OF_OTHERS)
    for name in itertools.islice(unknown, MOST_COMPARED):
        near = difflib.get_close_matches(_plain(name[:100]), list(known), 1, ALIKE)
        if near:
            raise ApiError(400, f"{name[:100]}: unknown field; is {known[near[0]]} meant?", "unknown_field", name[:100])


@dataclass(frozen=True)
class Sampling:
    """How texts are continued: the fields of `mdi.engine.sequence.SamplingParams` that a request says, as plain JSON."""

    values: dict[str, Any]
    seed: int


@dataclass(frozen=True)
class CommonFields:
    """Checked fields of a request.

    Attributes:
        n_tokens: None as many as the context holds.
        n_logprobs: top tokens whose probability is wanted; None if none are.
        grammar: {"type": "schema", "schema": ...}; None is any text.
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


def common_fields(fields: RequestFields, n_tokens: int | None, n_logprobs: int | None) -> CommonFields:
    """Raises ApiError, which names the field.

    Args:
        n_tokens: where the request does not say it.
    """
    if fields.best_of not in (None, fields.n):
        raise invalid("best_of", "only the value of n is supported")
    return CommonFields(
        model=fields.model,
        n=fields.n,
        n_tokens=fields.max_completion_tokens or fields.max_tokens or n_tokens,
        sampling=_sampling(fields, n_logprobs),
        stop=_stop(fields.stop),
        n_logprobs=n_logprobs,
        is_streamed=fields.stream,
        with_usage=bool(fields.stream_options.include_usage),
        grammar=_grammar(fields.response_format),
        deadline_s=fields.deadline_s or None,
    )


def _sampling(fields: RequestFields, n_logprobs: int | None) -> Sampling:
    seed = fields.seed
    if seed is not None and not -(1 << 63) <= seed < 1 << 64:
        raise invalid("seed", "expected a whole number of 64 bits")
    values = {
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": fields.top_k if fields.top_k > 0 else None,
        "min_p": fields.min_p,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "repetition_penalty": fields.repetition_penalty,
        "logit_bias": _logit_bias(fields.logit_bias),
        "n_logprobs": n_logprobs,
    }
    return Sampling(values, secrets.randbits(63) if seed is None else seed)


def _logit_bias(given: Mapping[str, float]) -> list[tuple[int, float]]:
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise invalid("logit_bias", f"expected token ids as keys, got {_shown(token)}")
    return [(int(token), float(value)) for token, value in given.items()]


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
