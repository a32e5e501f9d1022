"""/v1/completions: continues a prompt as it is, without a prompt style."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from msgspec import Meta

from mdi.serve.api_errors import invalid
from mdi.serve.api_state import ApiState
from mdi.serve.endpoint import EndpointJob
from mdi.serve.models import LoadedModel
from mdi.serve.process import ApiKey
from mdi.serve.request import (
    MOST_CHOICES,
    RequestFields,
    TextLogprobs,
    TextPiece,
    TopLogprobs,
    check_prompt,
    checked_text,
    common_fields,
    encoded,
    read_fields,
)

DEFAULT_TOKENS = 16  # as OpenAI has it


class CompletionFields(RequestFields, kw_only=True):
    prompt: Any = None
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    echo: bool = False
    logprobs: TopLogprobs | None = None
    suffix: Any = None


class Completion(EndpointJob):
    ID, OBJECT, CHUNK, continues = "cmpl", "text_completion", "text_completion", True

    def __init__(self, body: Any) -> None:
        fields = read_fields(CompletionFields, body)
        self.fields = common_fields(fields, DEFAULT_TOKENS, fields.logprobs)
        self._given = _prompts(fields.prompt)
        self.is_echoed = fields.echo
        self.n_texts = len(self._given) * self.fields.n
        if self.n_texts > MOST_CHOICES:
            raise invalid("n", f"at most {MOST_CHOICES} texts in one request")
        if self.is_echoed and fields.logprobs is not None:
            raise invalid("echo", "together with logprobs it is not supported")
        self.is_prompt_alone = fields.max_tokens == 0 and not fields.max_completion_tokens
        if self.is_prompt_alone and not self.is_echoed:
            raise invalid("max_tokens", "0 needs echo: there would be no text")
        if fields.suffix:
            raise invalid("suffix", "it is not supported")

    async def prompts(self, model: LoadedModel) -> list[list[int]]:
        encode = model.codec.encode
        prompts = [await encoded(model, p, encode, "prompt") if isinstance(p, str) else p for p in self._given]
        for prompt in prompts:
            check_prompt(model, prompt, "prompt")
        return prompts

    async def pieces(
        self, api: ApiState, model: LoadedModel, key: ApiKey | None, prompts: list[list[int]]
    ) -> AsyncIterator[TextPiece]:  # fmt: skip
        if not self.is_prompt_alone:
            async for piece in super().pieces(api, model, key, prompts):
                yield piece
            return
        for index in range(self.n_texts):
            yield TextPiece(index, "", finish_reason="length")

    def begin(self, model: LoadedModel, prompts: list[list[int]]) -> list[dict[str, Any]]:
        given = zip(self._given, prompts, strict=True)
        shown = [one if isinstance(one, str) else model.codec.decode(ids) for one, ids in given]
        self._texts = [text if self.is_echoed else "" for text in shown for _ in range(self.fields.n)]
        self._echoed = [*self._texts]
        self._logprobs = [TextLogprobs(model.codec) for _ in self._texts]
        self._reasons: list[str | None] = [None] * self.n_texts
        return [_choice(index, text, None, None) for index, text in enumerate(self._texts) if text]

    def piece(self, model: LoadedModel, piece: TextPiece) -> dict[str, Any] | None:
        i = piece.index
        if piece.n_before is not None:
            self._texts[i], self._logprobs[i] = self._echoed[i], TextLogprobs(model.codec)
        shown = self._logprobs[i].take(piece) if self.fields.n_logprobs is not None else None
        if not self.fields.is_streamed:
            self._texts[i] += piece.text
            self._reasons[i] = piece.finish_reason
        is_new = piece.text or piece.finish_reason or shown
        return _choice(i, piece.text, shown, piece.finish_reason) if is_new else None

    def choices(self) -> list[dict[str, Any]]:
        logprobs = [own.all if self.fields.n_logprobs is not None else None for own in self._logprobs]
        return [_choice(i, text, logprobs[i], self._reasons[i]) for i, text in enumerate(self._texts)]


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _prompts(given: Any) -> list[str | list[int]]:
    """A text, texts, token ids, or lists of token ids."""
    if isinstance(given, str):
        return [checked_text("prompt", given)]
    if isinstance(given, list) and given:
        if isinstance(given[0], str | list) and len(given) > MOST_CHOICES:  # before anything looks at all of them
            raise invalid("prompt", f"at most {MOST_CHOICES} texts in one request")
        if all(isinstance(one, str) for one in given):
            return [checked_text("prompt", one) for one in given]
        if _are_ids(given):
            return [given]
        if all(isinstance(one, list) and _are_ids(one) for one in given):
            return list(given)
    raise invalid("prompt", "expected a text, a list of texts, or token ids")


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 31 for value in values)
