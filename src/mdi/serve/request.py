"""A request's fields, each declared once, and its texts: from prompts to pieces of text and their probabilities.

Unknown fields are ignored, as in other servers, unless they are misspelt.
"""

from __future__ import annotations

import asyncio
import codecs
import difflib
import itertools
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from mdi.engine.sequence import UNMATCHED, seed_of
from mdi.errors import CheckpointError
from mdi.serve.api_errors import TOO_LONG, ApiError, checked_text, invalid
from mdi.serve.api_state import ApiState
from mdi.serve.engine_client import TextEvent
from mdi.serve.known import scores_of
from mdi.serve.models import LoadedModel
from mdi.serve.process import ApiKey
from mdi.text.answers.events import End, Event, Reasoning, Text
from mdi.text.answers.stream import AnswerStream
from mdi.text.texts import TextCodec

MOST_CHOICES = 32
MOST_STOPS = 16
LONGEST_STOP = 4096  # characters; each new token is compared with the beginnings of all of them
MOST_TOP_LOGPROBS = 20
LEAST_TOP_P = 1e-9  # for 0: the best token alone
ALIKE = 0.85  # of two names; with it, no field that other servers have is taken for one of this server's ...
OF_OTHERS = ("mode", "models", "repetition_penalty_range", "speed")  # ... but these
LEAST_PACE_S = 0.1  # tokens come from the engine process in bursts: a shorter time says nothing
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


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that `mdi.engine.sequence.SamplingParams` has by the same names; None is what the model has (mdi.text.drawing)."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] = {}


class TextFields(SamplingFields, kw_only=True):
    """Fields of all surfaces; null is a field that is not there."""

    model: str = ""
    seed: int | None = None
    stream: bool = False
    draft: Literal["auto", "none"] = "auto"
    deadline_s: Annotated[float, Meta(ge=0, le=86400)] = 0.0


class RequestFields(TextFields, kw_only=True):
    """Fields that completions and chats have in common, with OpenAI's defaults."""

    n: Choices = 1
    best_of: Choices | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    use_beam_search: bool = False
    length_penalty: Annotated[float, Meta(ge=-100, le=100)] = 1.0
    early_stopping: bool | Literal["never"] = False
    num_beam_groups: Annotated[int, Meta(ge=1, le=32)] = 1
    diversity_penalty: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    stop: Any = None
    stream_options: StreamOptions = StreamOptions()
    response_format: dict[str, Any] = {}
    prediction: dict[str, Any] = {}


Fields = TypeVar("Fields", bound=TextFields)


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
    except UnicodeEncodeError:
        raise ApiError(400, "a field's name is not valid Unicode: half of a surrogate pair", "invalid_body") from None
    check_spelling(kind, given)
    checked_text("model", fields.model)
    return fields


def check_spelling(kind: type[msgspec.Struct], given: Mapping[str, Any]) -> None:
    """Raises ApiError if a field has almost the name of a known one."""
    known = {_plain(name): name for name in sorted(kind.__struct_fields__)}
    unknown = (name for name in given if name not in kind.__struct_fields__ and name not in OF_OTHERS)
    for name in itertools.islice(unknown, MOST_COMPARED):
        near = difflib.get_close_matches(_plain(name[:100]), list(known), 1, ALIKE)
        if near:
            raise ApiError(400, f"{name[:100]}: unknown field; is {known[near[0]]} meant?", "unknown_field", name[:100])


@dataclass(frozen=True)
class Sampling:
    """How texts are continued: the fields of `mdi.engine.sequence.SamplingParams` that a request says, as plain JSON; those
    that it leaves out are the model's.
    """

    values: dict[str, Any]
    seed: int


@dataclass(frozen=True)
class CommonFields:
    """Checked fields of a request.

    Attributes:
        n_tokens: None as many as the context holds.
        n_logprobs: top tokens whose probability is wanted; None if none are.
        grammar: {"type": "schema", "schema": ..., "param": the field that it is of}; None is any text.
        deadline_s: the whole request must be done by then; None any time.
        beams: how the best texts are searched, the fields of `mdi.engine.cohort.Beams`; None: tokens are drawn.
        is_guessed: whether the next tokens may be guessed; prediction: a text that the answer probably repeats in parts.
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
    is_guessed: bool = True
    prediction: str = ""
    beams: Mapping[str, Any] | None = None

    @property
    def n_running(self) -> int:
        """Texts of each prompt that run at the same time."""
        return self.n if self.beams is None else int(self.beams["n"])


def one_text(fields: TextFields, n_tokens: int | None, stop: Sequence[str] = ()) -> CommonFields:
    """Of a surface that writes one text for each request. Raises ApiError, which names the field."""
    given = {name: getattr(fields, name) for name in TextFields.__struct_fields__}
    return common_fields(RequestFields(**given, max_tokens=n_tokens, stop=list(stop)), None, None)


def common_fields(fields: RequestFields, n_tokens: int | None, n_logprobs: int | None) -> CommonFields:
    """Raises ApiError, which names the field.

    Args:
        n_tokens: where the request does not say it.
    """
    inner = fields.response_format.get("json_schema")
    wanted = inner if isinstance(inner, dict) else {}
    best_of = fields.n if fields.best_of is None else fields.best_of
    if best_of != fields.n and not fields.use_beam_search:
        raise invalid("best_of", "without use_beam_search only the value of n is supported")
    if best_of < fields.n:
        raise invalid("best_of", "expected n or more")
    n_groups, penalty = fields.num_beam_groups, fields.diversity_penalty
    if n_groups > 1 and not fields.use_beam_search:
        raise invalid("num_beam_groups", "needs use_beam_search")
    if best_of % n_groups:
        raise invalid("num_beam_groups", f"the {best_of} beams (best_of) cannot be in {n_groups} groups of equal size")
    if (n_groups > 1) != (penalty > 0):
        raise invalid("diversity_penalty", "is more than 0 if num_beam_groups is more than 1, and else 0")
    beams = {
        "n": best_of, "length_penalty": fields.length_penalty, "early_stopping": fields.early_stopping,
        "n_groups": n_groups, "diversity_penalty": penalty,
    }  # fmt: skip
    return CommonFields(
        model=fields.model,
        n=fields.n,
        n_tokens=fields.max_completion_tokens or fields.max_tokens or n_tokens,
        sampling=_sampling(fields, n_logprobs),
        stop=_stop(fields.stop),
        n_logprobs=n_logprobs,
        is_streamed=fields.stream,
        with_usage=bool(fields.stream_options.include_usage),
        grammar=grammar_of("response_format", fields.response_format, wanted.get("schema")),
        deadline_s=fields.deadline_s or None,
        is_guessed=fields.draft == "auto",
        prediction=_prediction(fields.prediction),
        beams=beams if fields.use_beam_search else None,
    )


def check_beams(fields: CommonFields, key: ApiKey | None, context: int) -> None:
    """Raises ApiError if a request wants more beams, or more tokens of them, than its API key may have."""
    if fields.beams is None:
        return
    limits = key or ApiKey("", "")
    n = fields.n_running
    if n > limits.beams:
        raise invalid("best_of" if n > fields.n else "n", f"at most {limits.beams} beams are allowed")
    if n * min(fields.n_tokens or context, context) > limits.beam_tokens:
        raise invalid("max_tokens", f"at most {limits.beam_tokens // n} tokens are allowed with {n} beams")


def _prediction(given: Mapping[str, Any]) -> str:
    """The text of OpenAI's field of this name."""
    if not given:
        return ""
    content = given.get("content")
    if given.get("type") != "content" or not isinstance(content, str | list):
        raise invalid("prediction", 'expected {"type": "content", "content": a text, or a list of texts}')
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid("prediction", "the content has parts of type text only")
    return "".join(checked_text("prediction", part["text"]) for part in parts)


def _sampling(fields: RequestFields, n_logprobs: int | None) -> Sampling:
    seed = fields.seed
    if seed is not None and not -(1 << 63) <= seed < 1 << 64:
        raise invalid("seed", "expected a whole number of 64 bits")
    stated = {name: getattr(fields, name) for name in SamplingFields.__struct_fields__}
    if fields.top_p is not None:
        stated["top_p"] = max(fields.top_p, LEAST_TOP_P)
    values = {
        **{name: value for name, value in stated.items() if value is not None},
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


def grammar_of(param: str, form: Mapping[str, Any], schema: Any) -> dict[str, Any] | None:
    """What an answer of a form ({"type": ...}) must be; None: any text. Raises ApiError.

    Args:
        param: the field with the form.
        schema: of the type json_schema.
    """
    wanted = form.get("type", "text")
    if wanted == "text":
        return None
    if wanted == "json_object":
        return {"type": "schema", "schema": {"type": "object"}, "param": param}
    if wanted == "json_schema":
        if not isinstance(schema, dict):
            raise invalid(param, "json_schema needs an object `schema`")
        return {"type": "schema", "schema": schema, "param": param}
    raise invalid(param, f"expected type text, json_object or json_schema, got {_shown(wanted)}")


def _plain(name: str) -> str:
    """maxTokens, max-tokens and max_tokens are one name."""
    return name.lower().replace("_", "").replace("-", "")


def _shown(value: Any) -> str:
    return repr(value)[:60]


REASONS = ("eos", "stop", "length")  # any other end of a text is a failure


@dataclass(slots=True)
class TextPiece:
    """A piece of one text.

    Attributes:
        index: of the text in the request: prompts one after the other, the choices of a prompt beside each other.
        events: of the answer; the last one of all is its end.
        tokens: new ones, those that are no text among them.
        logprobs: of each of them, if they were asked for: its own, and the best ones' [[token, logprob], ...].
        n_cached, n_accepted, n_rejected: see TextEvent.
        scores: no token is new: they are those of the prompt but the first, as `logprobs`.
        n_before: it is the whole text so far, in the place of pieces with so many tokens that were not all right.
        is_followed: the next one is there already, so that both can be sent together.
    """

    index: int
    events: Sequence[Event]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = None
    n_cached: int = 0
    n_accepted: int = 0
    n_rejected: int = 0
    n_before: int | None = None
    scores: list[Any] | None = None
    is_followed: bool = False

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Text))

    @property
    def finish_reason(self) -> str | None:
        return self.events[-1].reason if self.events and isinstance(self.events[-1], End) else None


async def encoded(model: LoadedModel, text: str, encode: Callable[[str], list[int]], param: str) -> list[int]:
    """Ids of a text. It is tokenized in a thread: others do not wait for a long text or a slow tokenizer. Raises ApiError."""
    check_characters(model, len(text), param)
    try:
        return await asyncio.to_thread(encode, text)
    except CheckpointError as e:
        raise ApiError(400, f"{param}: {e}", e.code, param) from None


def check_characters(model: LoadedModel, n: int, param: str) -> None:
    """Raises ApiError if a text of n characters has too many tokens, whatever it says."""
    if n > model.most_characters:
        raise ApiError(
            400, f"{param}: it has {n} characters, more than the {model.context} tokens of this model's texts can hold",
            TOO_LONG, param,
        )  # fmt: skip


def check_prompt(model: LoadedModel, ids: Sequence[int], param: str) -> None:
    """Raises ApiError if the model cannot continue it."""
    if not ids:
        raise invalid(param, "it has no token")
    if len(ids) >= model.context:
        raise ApiError(
            400, f"{param}: it has {len(ids)} tokens, and this model's texts may have {model.context} in all",
            TOO_LONG, param,
        )  # fmt: skip
    if min(ids) < 0 or max(ids) >= model.n_vocabulary:
        raise invalid(param, f"token ids are from 0 to {model.n_vocabulary - 1}")


TOLD_WRONG = (
    "a node gave wrong rows, and a part of this text that was sent already is wrong: ask again (a request without stream goes "
    "on by itself)"
)


@dataclass(frozen=True)
class Opened:
    """What a request asks of a model.

    Attributes:
        open_answer: makes what reads the ids of one text.
        stop: strings that end a text.
        ends: ids that do, besides those of the model.
        n_best: the tokens of the prompts are scored, with so many of the best ones at each place; None: they are not.
        is_prompt_alone: whether no token is wanted.
        grammar: in the place of the request's, for this model.
        failure: why there is no text, for clients who are told of it in a stream.
    """

    prompts: Sequence[Sequence[int]]
    open_answer: Callable[[], AnswerStream]
    stop: Sequence[str] = ()
    is_prompt_alone: bool = False
    ends: Sequence[int] = ()
    n_best: int | None = None
    grammar: Mapping[str, Any] | None = None
    failure: ApiError | None = None


async def write_texts(
    api: ApiState, model: LoadedModel, key: ApiKey | None, opened: Opened, fields: CommonFields
) -> AsyncIterator[TextPiece]:
    """Pieces of the `fields.n` texts of each prompt, as they come. If left early, unfinished texts are freed on all nodes.

    Raises:
        ApiError: the engine could not continue.
    """
    if opened.failure is not None:
        raise opened.failure
    prompts = opened.prompts
    owner = "" if key is None else key.name
    predicted: list[int] = []
    if fields.prediction:
        predicted = await encoded(
            model, fields.prediction, partial(model.tokenizer.ids_of, adds_special=False), "prediction"
        )
    n_texts = len(prompts) * fields.n
    unfinished = set(range(n_texts))
    is_computed = opened.n_best is not None or not opened.is_prompt_alone
    observe = api.observe if is_computed else ()

    def end(index: int, reason: str) -> None:
        unfinished.remove(index)
        for observer in observe:
            observer.ended(reason)

    for prompt in prompts:
        for observer in observe:
            observer.began(owner, model.name, len(prompt))
    try:
        if opened.n_best is not None:
            scores = await scores_of(api, model, owner, prompts, opened.n_best)
            for index in range(n_texts):
                yield TextPiece(index, [], scores=scores[index // fields.n])
        if opened.is_prompt_alone:
            for index in range(n_texts):
                end(index, "length")
                yield TextPiece(index, [End("length")])
            return
        if fields.beams is None:
            each = [prompt for prompt in prompts for _ in range(fields.n)]
            more: dict[str, Any] = {"is_guessed": fields.is_guessed, "prediction": predicted}
        else:  # one request finds the best texts of a prompt
            each = list(prompts)
            more = {"beams": fields.beams, "n": fields.n, "stop": list(opened.stop)}
        more["ends"] = [*opened.ends]
        if (
            opened.n_best is not None and fields.n_tokens == 1
        ):  # programs that score leave the last token out: it must be there
            more["ignores_end"] = True
        if opened.grammar is not None:
            more["grammar"] = opened.grammar
        requests = [{**_request(model, owner, prompt, fields, index), **more} for index, prompt in enumerate(each)]
        answers = [opened.open_answer() for _ in range(n_texts)]
        withheld = [_Withheld() for _ in range(n_texts)]
        begin = time.monotonic()
        last = [begin] * n_texts
        with api.engine.generate(requests) as texts:
            async for index, event in texts:
                if index not in unfinished:
                    continue  # tokens beyond a stop string
                now = time.monotonic()
                if event.tokens:
                    _count(api, owner, len(event.tokens), begin, last[index], now)
                last[index] = now
                n_before = None
                if event.n_kept is not None:
                    if fields.is_streamed:
                        raise ApiError(500, TOLD_WRONG, "engine_untrue")
                    n_before = len(withheld[index].tokens)
                    answers[index] = opened.open_answer()
                    event, withheld[index] = withheld[index].before(event, event.n_kept), _Withheld()
                if not fields.is_streamed:
                    withheld[index].take(event)
                if opened.n_best is not None:  # what is cached then, this request has computed
                    event = event._replace(n_cached=0)
                piece = _piece(index, event, answers[index], n_before)
                piece.is_followed = texts.has_next
                if piece.finish_reason is not None:
                    texts.cancel(index)
                    end(index, piece.finish_reason)
                yield piece
    finally:
        for index in [*unfinished]:
            end(index, "cancelled")


def _count(api: ApiState, owner: str, n_tokens: int, begin: float, last: float, now: float) -> None:
    """Tell the observers of new tokens of a text, whose last ones came at `last`."""
    is_first = last == begin
    for observer in api.observe:
        if is_first:
            observer.first_token(now - begin)
        observer.tokens(owner, n_tokens, 0.0 if is_first else now - last)


def _request(model: LoadedModel, owner: str, prompt: Sequence[int], fields: CommonFields, index: int) -> dict[str, Any]:
    most = model.context - len(prompt)
    sampling = {**model.codec.drawing, **fields.sampling.values}
    sampling |= {
        "top_k": sampling["top_k"] if sampling["top_k"] > 0 else None,
        "n_tokens": most if fields.n_tokens is None else min(fields.n_tokens, most),
        "seed": seed_of(fields.sampling.seed, index),
    }
    return {
        "model": model.name, "adapter": model.adapter, "ids": list(prompt), "sampling": sampling, "owner": owner,
        "grammar": fields.grammar,
    }  # fmt: skip


@dataclass
class _Withheld:
    """Tokens of an answer that is delivered as a whole: until then they may be retracted."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    def take(self, event: TextEvent) -> None:
        self.tokens += event.tokens
        self.logprobs += event.logprobs or []

    def before(self, event: TextEvent, n_kept: int) -> TextEvent:
        """An event with the first of these before it."""
        logprobs = [*self.logprobs[:n_kept], *(event.logprobs or [])]
        return event._replace(tokens=[*self.tokens[:n_kept], *event.tokens], logprobs=logprobs)


def _piece(index: int, event: TextEvent, answer: AnswerStream, n_before: int | None = None) -> TextPiece:
    events = answer.feed(event.tokens)
    reason = event.finish_reason
    if reason == UNMATCHED:
        raise invalid("response_format", "the JSON schema is too large, or leads to where no text can go on")
    if reason is not None and reason not in REASONS:
        raise ApiError(500, "the nodes could not go on with this text", "engine_" + reason)
    if reason is not None or answer.is_stopped:
        events += answer.close(is_cut=reason == "length")
    counts = event.n_cached, event.n_accepted, event.n_rejected
    return TextPiece(index, events, event.tokens, event.logprobs, *counts, n_before)


@dataclass
class Usage:
    """Tokens of a request.

    Attributes:
        cached: of each prompt, by its number: tokens that caches still held.
        reasoning: of each text, by its number: new tokens that are reasoning.
        begin_s: when the texts were begun; first_s, last_s: when their first tokens came, and their last ones; None: not yet.
    """

    n_prompt: int
    n_completion: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    n_accepted: int = 0
    n_rejected: int = 0
    reasoning: dict[int, int] = field(default_factory=dict)
    begin_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float | None = None
    _n_first: int = 0

    @property
    def n_cached(self) -> int:
        return sum(self.cached.values())

    @property
    def n_reasoning(self) -> int:
        return sum(self.reasoning.values())

    @property
    def pace(self) -> dict[str, float]:
        """Seconds until the first tokens, and tokens per second behind them, if they took LEAST_PACE_S."""
        if self.first_s is None or self.last_s is None:
            return {}
        found = {"first_token_s": round(self.first_s - self.begin_s, 6)}
        n, spent_s = self.n_completion - self._n_first, self.last_s - self.first_s
        return found | ({"tokens_s": round(n / spent_s, 3)} if spent_s >= LEAST_PACE_S else {})

    def count(self, piece: TextPiece, n_choices: int) -> None:
        """A piece of a text, of so many for each prompt. A prompt is counted once, by the first of its texts."""
        self.n_completion += len(piece.tokens) - (piece.n_before or 0)
        n_reasoning = len(piece.tokens) if any(isinstance(event, Reasoning) for event in piece.events) else 0
        before = 0 if piece.n_before is not None else self.reasoning.get(piece.index, 0)
        self.reasoning[piece.index] = before + n_reasoning
        if piece.tokens:
            self.last_s = time.monotonic()
            if self.first_s is None:
                self.first_s, self._n_first = self.last_s, len(piece.tokens)
        self.n_accepted += piece.n_accepted
        self.n_rejected += piece.n_rejected
        if piece.index % n_choices == 0:
            self.cached[piece.index // n_choices] = piece.n_cached


LEAST = -9999.0  # means "never": JSON has no infinity


class TextLogprobs:
    """Of one text of /v1/completions, as its pieces come."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._n_chars = 0  # before the next token; characters that are not whole yet do not count
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self.all: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def take(self, piece: TextPiece) -> dict[str, list[Any]] | None:
        """The new piece; None if nothing is new."""
        return self._grown(piece.tokens, piece.logprobs or []) if piece.tokens else None

    def take_prompt(self, ids: Sequence[int], scores: Sequence[Any]) -> dict[str, list[Any]]:
        """The tokens of the prompt, of which the first has nothing before it; see TextPiece."""
        return self._grown(ids, [None, *scores])

    def _grown(self, tokens: Sequence[int], found: Sequence[Any]) -> dict[str, list[Any]]:
        new: dict[str, list[Any]] = {name: [] for name in self.all}
        for token, one in zip(tokens, found, strict=False):
            data = self._codec.token_bytes(token)
            new["tokens"].append(_name(data))
            new["token_logprobs"].append(None if one is None else _finite(one[0]))
            named: dict[str, float] = {}
            for i, value in () if one is None else one[1]:  # the best first, which stays where several are no text
                named.setdefault(_name(self._codec.token_bytes(i)), _finite(value))
            new["top_logprobs"].append(None if one is None else named)
            new["text_offset"].append(self._n_chars)
            self._n_chars += len(self._characters.decode(data))
        for name, values in new.items():
            self.all[name] += values
        return new


def chat_logprobs(codec: TextCodec, piece: TextPiece) -> list[dict[str, Any]]:
    """Of a piece of a chat's answer."""
    return [
        {**_entry(codec, token, own), "top_logprobs": [_entry(codec, i, value) for i, value in best]}
        for token, (own, best) in zip(piece.tokens, piece.logprobs or [], strict=False)
    ]


def _entry(codec: TextCodec, token: int, value: float | None) -> dict[str, Any]:
    data = codec.token_bytes(token)
    return {"token": _name(data), "logprob": _finite(value), "bytes": list(data)}


def _name(data: bytes) -> str:
    """The text of a token; of a part of a character, its bytes as OpenAI writes them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data)


def _finite(value: float | None) -> float:
    return LEAST if value is None else value
