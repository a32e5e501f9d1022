"""The texts of one request: from prompts to pieces of text and their probabilities, for all endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mdi.engine.sequence import UNMATCHED, seed_of
from mdi.errors import CheckpointError
from mdi.serve.api_errors import ApiError, invalid
from mdi.serve.api_state import ApiState
from mdi.serve.engine_client import TextEvent
from mdi.serve.models import LoadedModel
from mdi.serve.parameters import CommonFields
from mdi.serve.serve_settings import ApiKey
from mdi.text.texts import TextCodec, TextStream

# What the engine calls the end of a text -> what OpenAI does; any other end is a failure.
REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass(frozen=True)
class TextPiece:
    """A piece of one text.

    Attributes:
        index: of the text in the request: prompts one after the other, the choices of a prompt beside each other.
        tokens: new ones, those that are no text among them.
        logprobs: of each of them, if they were asked for: its own, and the best ones' [[token, logprob], ...].
        finish_reason: set in the last one.
        n_cached: tokens of the prompt that did not have to be computed.
    """

    index: int
    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = None
    finish_reason: str | None = None
    n_cached: int = 0


async def encoded(model: LoadedModel, text: str, encode: Callable[[str], list[int]], param: str) -> list[int]:
    """Ids of a text. It is tokenized in a thread: others do not wait for a long text or a slow tokenizer. Raises ApiError."""
    if len(text) > model.most_characters:
        raise ApiError(
            400, f"{param}: it has {len(text)} characters, more than the {model.context} tokens of this model's texts can hold",
            "context_length_exceeded", param,
        )  # fmt: skip
    try:
        return await asyncio.to_thread(encode, text)
    except CheckpointError as e:
        raise ApiError(400, f"{param}: {e}", e.code, param) from None


def check_prompt(model: LoadedModel, ids: Sequence[int], param: str) -> None:
    """Raises ApiError if the model cannot continue it."""
    if not ids:
        raise invalid(param, "it has no token")
    if len(ids) >= model.context:
        raise ApiError(
            400, f"{param}: it has {len(ids)} tokens, and this model's texts may have {model.context} in all",
            "context_length_exceeded", param,
        )  # fmt: skip
    if min(ids) < 0 or max(ids) >= model.n_vocabulary:
        raise invalid(param, f"token ids are from 0 to {model.n_vocabulary - 1}")


async def write_texts(
    api: ApiState, model: LoadedModel, key: ApiKey | None, prompts: Sequence[Sequence[int]], fields: CommonFields,
    continues: bool, stop: tuple[str, ...] = (),
) -> AsyncIterator[TextPiece]:  # fmt: skip
    """Pieces of the `fields.n` texts of each prompt, as they come. If left early, unfinished texts are freed on all nodes.

    Args:
        continues: whether the text continues that of the prompt.
        stop: further stop strings.

    Raises:
        ApiError: the engine could not continue.
    """
    owner = "" if key is None else key.name
    requests = [
        _request(model, owner, prompt, fields, index)
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(fields.n))
    ]
    answers = [TextStream(model.codec, (*fields.stop, *stop), continues) for _ in requests]
    begin = time.monotonic()
    last = [begin] * len(requests)
    unfinished = set(range(len(requests)))
    for prompt in prompts:
        for observer in api.observe:
            observer.began(owner, model.name, len(prompt))
    try:
        with api.engine.generate(requests) as texts:
            async for index, event in texts:
                if index not in unfinished:
                    continue  # tokens beyond a stop string
                now = time.monotonic()
                if event.tokens:
                    _count(api, len(event.tokens), begin, last[index], now)
                last[index] = now
                piece = _piece(index, event, answers[index])
                if piece.finish_reason is not None:
                    texts.cancel(index)
                    unfinished.remove(index)
                    for observer in api.observe:
                        observer.ended(piece.finish_reason)
                yield piece
    finally:
        for observer in api.observe:
            for _ in unfinished:
                observer.ended("cancelled")


def _count(api: ApiState, n_tokens: int, begin: float, last: float, now: float) -> None:
    """Tell the observers of new tokens of a text, whose last ones came at `last`."""
    is_first = last == begin
    for observer in api.observe:
        if is_first:
            observer.first_token(now - begin)
        observer.tokens(n_tokens, 0.0 if is_first else now - last)


def _request(model: LoadedModel, owner: str, prompt: Sequence[int], fields: CommonFields, index: int) -> dict[str, Any]:
    most = model.context - len(prompt)
    sampling = {
        **fields.sampling.values,
        "n_tokens": most if fields.n_tokens is None else min(fields.n_tokens, most),
        "seed": seed_of(fields.sampling.seed, index),
    }
    return {"model": model.name, "ids": list(prompt), "sampling": sampling, "owner": owner, "grammar": fields.grammar}


def _piece(index: int, event: TextEvent, answer: TextStream) -> TextPiece:
    text = answer.push(event.tokens)
    reason = event.finish_reason
    if reason is not None:
        if reason == UNMATCHED:
            raise invalid("response_format", "the JSON schema is too large, or leads to where no text can go on")
        if reason not in REASONS:
            raise ApiError(500, "the nodes could not go on with this text", "engine_" + reason)
        if not answer.is_stopped:
            text += answer.flush()
    if answer.is_stopped:
        reason = "stop"
    ended = None if reason is None else REASONS[reason]
    return TextPiece(index, text, event.tokens, event.logprobs, ended, event.n_cached)


@dataclass
class Usage:
    """Tokens of a request.

    Attributes:
        cached: of each prompt, by its number: tokens that caches still held.
    """

    n_prompt: int
    n_completion: int = 0
    cached: dict[int, int] = field(default_factory=dict)

    def count(self, piece: TextPiece, n_choices: int) -> None:
        """A piece of a text, of so many for each prompt. A prompt is counted once, by the first of its texts."""
        self.n_completion += len(piece.tokens)
        if piece.index % n_choices == 0:
            self.cached[piece.index // n_choices] = piece.n_cached

    def to_json(self) -> dict[str, Any]:
        total = self.n_prompt + self.n_completion
        counts = {"prompt_tokens": self.n_prompt, "completion_tokens": self.n_completion, "total_tokens": total}
        return {**counts, "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())}}


LEAST = -9999.0  # means "never": JSON has no infinity


class TextLogprobs:
    """Of one text of /v1/completions, as its pieces come."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._n_chars = 0
        self.all: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def take(self, piece: TextPiece) -> dict[str, list[Any]] | None:
        """The new piece; None if nothing is new."""
        if not piece.tokens:
            return None
        new: dict[str, list[Any]] = {name: [] for name in self.all}
        for token, (own, best) in zip(piece.tokens, piece.logprobs or [], strict=False):
            text = _text(self._codec, token)
            new["tokens"].append(text)
            new["token_logprobs"].append(_finite(own))
            new["top_logprobs"].append({_text(self._codec, i): _finite(value) for i, value in best})
            new["text_offset"].append(self._n_chars)
            self._n_chars += len(text)
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
    text = _text(codec, token)
    return {"token": text, "logprob": _finite(value), "bytes": list(text.encode())}


def _text(codec: TextCodec, token: int) -> str:
    return codec.decode([token], continues=True)


def _finite(value: float | None) -> float:
    return LEAST if value is None else value
