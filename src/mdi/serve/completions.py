"""/v1/completions: continues a prompt as it is, without a prompt style."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from msgspec import Meta

from mdi.serve.api_errors import invalid
from mdi.serve.endpoint import Answers
from mdi.serve.models import LoadedModel
from mdi.serve.openai import Choices, surface
from mdi.serve.request import (
    MOST_CHOICES,
    Opened,
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
from mdi.text.answers.forms import WORDS
from mdi.text.answers.stream import AnswerStream
from mdi.text.infill import Gap, with_gap

DEFAULT_TOKENS = 16  # as OpenAI has it
MOST_SCORES = 1 << 21  # of all prompts of a request, with those of the best tokens: they are in memory together


class CompletionFields(RequestFields, kw_only=True):
    prompt: Any = None
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    echo: bool = False
    logprobs: TopLogprobs | None = None
    suffix: str = ""


class Completion:
    """A request, read from its body."""

    def __init__(self, body: Any) -> None:
        fields = read_fields(CompletionFields, body)
        self.fields = common_fields(fields, DEFAULT_TOKENS, fields.logprobs)
        self.given = texts_or_ids("prompt", fields.prompt, MOST_CHOICES)
        self.is_echoed = fields.echo
        self.n_texts = len(self.given) * self.fields.n
        if self.n_texts > MOST_CHOICES:
            raise invalid("n", f"at most {MOST_CHOICES} texts in one request")
        self._n_best = fields.logprobs if self.is_echoed else None
        self.is_prompt_alone = fields.max_tokens == 0 and not fields.max_completion_tokens
        if self.is_prompt_alone and not self.is_echoed:
            raise invalid("max_tokens", "0 needs echo: there would be no text")
        self._suffix = checked_text("suffix", fields.suffix)
        if self._suffix and self.is_echoed:
            raise invalid("suffix", "together with echo it is not supported")

    async def opened(self, model: LoadedModel) -> Opened:
        ends: list[int] = []
        if self._suffix:
            gaps = [await self._with_gap(model, p) for p in self.given]
            prompts, ends = [gap.ids for gap in gaps], gaps[0].ends
        else:
            encode = model.codec.encode
            prompts = [await encoded(model, p, encode, "prompt") if isinstance(p, str) else p for p in self.given]
        for prompt in prompts:
            check_prompt(model, prompt, "prompt")
        if self._n_best is not None and sum(map(len, prompts)) * self.fields.n * (1 + self._n_best) > MOST_SCORES:
            why = "the scores would be too many: ask for fewer or shorter prompts, a smaller n, or fewer logprobs"
            raise invalid("logprobs", why)
        answer = partial(AnswerStream, model.codec, WORDS, self.fields.stop, continues=True)
        return Opened(prompts, answer, self.fields.stop, self.is_prompt_alone, ends, self._n_best)

    async def _with_gap(self, model: LoadedModel, before: str | list[int]) -> Gap:
        gaps: list[Gap | None] = []

        def encode(behind: str) -> list[int]:
            gaps.append(with_gap(model.tokenizer, before, behind, model.codec.first_id, model.codec.special_ids))
            return []

        text = before if isinstance(before, str) else ""
        await encoded(model, text, lambda text: [], "prompt")  # it is not too long
        await encoded(model, self._suffix, encode, "suffix")
        if (gap := gaps[0]) is None:
            raise invalid("suffix", f"the tokenizer of {model.asked_name} has no marks for a text with a gap")
        return gap


class CompletionChoices(Choices):
    ID, OBJECT, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(self, asked: Completion, answers: Answers) -> None:
        self._codec, self._fields, self._prompts = answers.model.codec, asked.fields, answers.opened.prompts
        self._are_scored = answers.opened.n_best is not None
        given = zip(asked.given, answers.opened.prompts, strict=True)
        shown = [one if isinstance(one, str) else self._codec.decode(ids) for one, ids in given]
        self._echoed = [text if asked.is_echoed else "" for text in shown for _ in range(self._fields.n)]
        self._texts = [*self._echoed]
        self._logprobs = [TextLogprobs(self._codec) for _ in self._texts]
        self._reasons: list[str | None] = [None] * asked.n_texts

    def begin(self) -> list[dict[str, Any]]:
        if self._are_scored:  # they come with their scores
            return []
        return [_choice(index, text, None, None) for index, text in enumerate(self._echoed) if text]

    def piece(self, piece: TextPiece) -> dict[str, Any] | None:
        i, text, reason = piece.index, piece.text, piece.finish_reason
        if piece.scores is not None:
            scored = self._logprobs[i].take_prompt(self._prompts[i // self._fields.n], piece.scores)
            return _choice(i, self._echoed[i], scored, None)
        if piece.n_before is not None:
            self._texts[i], self._logprobs[i] = self._echoed[i], TextLogprobs(self._codec)
        shown = self._logprobs[i].take(piece) if self._fields.n_logprobs is not None else None
        if not self._fields.is_streamed:
            self._texts[i] += text
            self._reasons[i] = reason
        return _choice(i, text, shown, reason) if text or reason or shown else None

    def choices(self) -> list[dict[str, Any]]:
        logprobs = [own.all if self._fields.n_logprobs is not None else None for own in self._logprobs]
        return [_choice(i, text, logprobs[i], self._reasons[i]) for i, text in enumerate(self._texts)]


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def texts_or_ids(param: str, given: Any, n_most: int) -> list[str | list[int]]:
    """A text, texts, token ids, or lists of token ids. Raises ApiError: it is something else, or more than `n_most`."""
    if isinstance(given, str):
        return [checked_text(param, given)]
    if isinstance(given, list) and given:
        if isinstance(given[0], str | list) and len(given) > n_most:  # before anything looks at all of them
            raise invalid(param, f"at most {n_most} texts in one request")
        if all(isinstance(one, str) for one in given):
            return [checked_text(param, one) for one in given]
        if _are_ids(given):
            return [given]
        if all(isinstance(one, list) and _are_ids(one) for one in given):
            return list(given)
    raise invalid(param, "expected a text, a list of texts, or token ids")


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 31 for value in values)


COMPLETIONS = surface(Completion, CompletionChoices)
