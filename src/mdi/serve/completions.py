"""/v1/completions: continues a prompt as it is, without a prompt style."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from mdi.serve.api_errors import invalid
from mdi.serve.api_state import ApiState
from mdi.serve.endpoint import EndpointJob, Exchange, stream_event
from mdi.serve.models import LoadedModel
from mdi.serve.parameters import MOST_CHOICES, RequestFields, TopLogprobs, checked_text, common_fields, read_fields
from mdi.serve.request_texts import TextLogprobs, Usage, check_prompt, encoded, write_texts

DEFAULT_TOKENS = 16  # as OpenAI has it


class CompletionFields(RequestFields, kw_only=True):
    prompt: Any = None
    echo: bool = False
    logprobs: TopLogprobs | None = None
    suffix: Any = None


class Completion(EndpointJob):
    def __init__(self, body: Any) -> None:
        fields = read_fields(CompletionFields, body)
        self.fields = common_fields(fields, DEFAULT_TOKENS, fields.logprobs)
        self.prompts = _prompts(fields.prompt)
        self.is_echoed = fields.echo
        self.n_texts = len(self.prompts) * self.fields.n
        if self.n_texts > MOST_CHOICES:
            raise invalid("n", f"at most {MOST_CHOICES} texts in one request")
        if self.is_echoed and fields.logprobs is not None:
            raise invalid("echo", "together with logprobs it is not supported")
        if fields.suffix:
            raise invalid("suffix", "it is not supported")

    async def run(self, api: ApiState, model: LoadedModel, exchange: Exchange) -> None:
        encode = model.codec.encode
        prompts = [await encoded(model, p, encode, "prompt") if isinstance(p, str) else p for p in self.prompts]
        for prompt in prompts:
            check_prompt(model, prompt, "prompt")
        usage = Usage(sum(map(len, prompts)))
        base = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        fields = self.fields
        texts = [self._echo(model, prompts[i // fields.n]) for i in range(self.n_texts)]
        logprobs = [TextLogprobs(model.codec) for _ in texts]
        reasons: list[str | None] = [None] * len(texts)
        if fields.is_streamed:
            for index, text in enumerate(texts):
                if text:
                    await exchange.push(stream_event({**base, "choices": [_choice(index, text, None, None)]}))
        async for piece in write_texts(api, model, exchange.key, prompts, fields, continues=True):
            usage.count(piece, fields.n)
            i = piece.index
            shown = logprobs[i].take(piece) if fields.n_logprobs is not None else None
            if not fields.is_streamed:
                texts[i] += piece.text
                reasons[i] = piece.finish_reason
            elif piece.text or piece.finish_reason or shown:
                await exchange.push(
                    stream_event({**base, "choices": [_choice(i, piece.text, shown, piece.finish_reason)]})
                )
        if fields.is_streamed:
            if fields.with_usage:
                await exchange.push(stream_event({**base, "choices": [], "usage": usage.to_json()}))
            await exchange.end()
            return
        alls = [own.all if fields.n_logprobs is not None else None for own in logprobs]
        choices = [_choice(i, text, alls[i], reasons[i]) for i, text in enumerate(texts)]
        await exchange.answer({**base, "choices": choices, "usage": usage.to_json()})

    def _echo(self, model: LoadedModel, prompt: Sequence[int]) -> str:
        return model.codec.decode(prompt) if self.is_echoed else ""


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
