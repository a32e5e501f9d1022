"""/v1/embeddings, and /api/embed of Ollama's API: one vector for each text, of length 1."""

from __future__ import annotations

import base64
import json
import math
import time
from array import array
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from mdi.serve.api_errors import ApiError, invalid
from mdi.serve.completions import texts_or_ids
from mdi.serve.endpoint import Answers, Exchange, Surface
from mdi.serve.known import TOGETHER
from mdi.serve.models import LoadedModel
from mdi.serve.ollama import LATEST, error_of
from mdi.serve.request import Limit, Opened, TextFields, check_prompt, encoded, one_text, read_fields
from mdi.text.answers.forms import WORDS
from mdi.text.answers.stream import AnswerStream

MOST_INPUTS, MOST_TOKENS = 2048, 300_000  # of one request, as OpenAI has it
MOST_NUMBERS = 1 << 21  # of all vectors of an answer, which is written as a whole: some 40 MB of JSON


class EmbeddingFields(TextFields, kw_only=True):
    input: Any = None
    dimensions: Limit | None = None
    encoding_format: Literal["float", "base64"] = "float"


class EmbedFields(TextFields, kw_only=True):
    """Of Ollama's API; `prompt` of its older path."""

    input: Any = None
    prompt: str = ""
    truncate: bool = True
    dimensions: Limit | None = None
    keep_alive: float | str = ""
    options: dict[str, Any] = {}  # of drawing, and num_ctx, which the server has decided already


class Embedding:
    """A request, read from its body.

    Attributes:
        texts: each a text or its ids.
        dimensions: numbers of a vector that are wanted, the first ones; None: all.
        is_cut: whether texts that are too long are cut.
    """

    is_cut = False

    def __init__(self, body: Any) -> None:
        fields = read_fields(EmbeddingFields, body)
        self._take(fields, "input", fields.input, fields.dimensions)
        self.is_base64 = fields.encoding_format == "base64"

    def _take(self, fields: TextFields, param: str, given: Any, dimensions: int | None) -> None:
        self._param, self.dimensions = param, dimensions
        self.fields = one_text(fields, None)
        self.texts = texts_or_ids(param, given, MOST_INPUTS)
        self.n_texts = min(len(self.texts), TOGETHER)

    async def opened(self, model: LoadedModel) -> Opened:
        if model.pooling is None:
            raise ApiError(400, f"{model.asked_name} cannot embed: {model.no_pooling}", "no_pooling", "model")
        if (self.dimensions or 0) > model.width:
            raise invalid("dimensions", f"the vectors of this model have {model.width}")
        if len(self.texts) * (self.dimensions or model.width) > MOST_NUMBERS:
            raise invalid(
                self._param, "the vectors would be too large: ask for fewer texts in one request, or set dimensions"
            )
        prompts, n_tokens = [], 0
        for text in self.texts:
            ids = text if isinstance(text, list) else await self._encoded(model, text)
            if self.is_cut and len(ids) >= model.context:
                n, last = model.context - 1, ids[-1:] if ids[-1] in model.codec.eos_ids else []
                ids = ids[: n - len(last)] + last
            check_prompt(model, ids, self._param)
            prompts.append(ids)
            n_tokens += len(ids)
            if n_tokens > MOST_TOKENS:
                raise invalid(self._param, f"at most {MOST_TOKENS} tokens in one request")
        return Opened(prompts, partial(AnswerStream, model.codec, WORDS), is_prompt_alone=True)

    async def _encoded(self, model: LoadedModel, text: str) -> list[int]:
        """With the tokens that the tokenizer itself puts around a text, of which the last may be the one that is wanted."""
        if self.is_cut:
            text = text[: model.most_characters]
        return await encoded(model, text, model.tokenizer.embedded_ids, self._param)


async def _vectors(asked: Embedding, answers: Answers) -> list[str]:
    """Of each text as JSON: numbers, or one text in base64."""
    found = [""] * len(asked.texts)
    async for index, event in answers.known({"pooling": answers.model.pooling}):
        if event.finish_reason is not None:
            found[index] = _written(event.pooled, asked.dimensions, asked.is_base64)
    return found


def _written(pooled: str, dimensions: int | None, is_base64: bool) -> str:
    if is_base64 and dimensions is None:
        return json.dumps(pooled)
    vector = array("f", base64.b64decode(pooled))
    if dimensions is not None:
        vector = vector[:dimensions]
        length = math.sqrt(math.fsum(value * value for value in vector)) or 1.0
        vector = array("f", [value / length for value in vector])
    return json.dumps(base64.b64encode(vector.tobytes()).decode() if is_base64 else vector.tolist())


def _joined(body: Mapping[str, Any], name: str, parts: list[str]) -> bytes:
    """A body with one more field, a list whose parts are JSON already: written at once, they would hold others up."""
    return f'{json.dumps(body)[:-1]}, "{name}": [{",".join(parts)}]}}'.encode()


async def _answer(asked: Embedding, answers: Answers, exchange: Exchange) -> None:
    vectors = await _vectors(asked, answers)
    n = answers.usage.n_prompt
    usage = {"prompt_tokens": n, "total_tokens": n}
    body = {"object": "list", "model": answers.model.asked_name, "usage": usage}
    data = [f'{{"object":"embedding","index":{i},"embedding":{one}}}' for i, one in enumerate(vectors)]
    await exchange.answer(_joined(body, "data", data))


class OllamaEmbedding(Embedding):
    """Args:
    is_old: one text, by the older path.
    """

    is_base64 = False

    def __init__(self, body: Any, is_old: bool = False) -> None:
        self.begin_s, self.is_old = time.monotonic(), is_old
        fields = read_fields(EmbedFields, body)
        self.name, self.is_cut = fields.model, fields.truncate
        fields.model = fields.model.removesuffix(LATEST)
        given = fields.prompt if is_old else fields.input
        self.says_nothing = not given
        self._take(fields, "prompt" if is_old else "input", given or "-", fields.dimensions)

    async def opened(self, model: LoadedModel) -> Opened:
        """One that says nothing has the model loaded."""
        if self.says_nothing:
            self.texts = []
        return await super().opened(model)


async def _embed(asked: OllamaEmbedding, answers: Answers, exchange: Exchange) -> None:
    vectors = await _vectors(asked, answers)
    if asked.is_old:
        await exchange.answer(f'{{"embedding": {vectors[0] if vectors else []}}}'.encode())
        return
    begin_s, usage = asked.begin_s, answers.usage
    seconds = {"total_duration": time.monotonic() - begin_s, "load_duration": usage.begin_s - begin_s}
    told = {name: int(s * 1e9) for name, s in seconds.items()} | {"prompt_eval_count": usage.n_prompt}
    await exchange.answer(_joined({"model": asked.name or answers.model.asked_name, **told}, "embeddings", vectors))


EMBEDDINGS = Surface(Embedding, _answer, lambda error: error.body, is_in_parts=True)
OLLAMA_EMBEDDINGS = Surface(OllamaEmbedding, _embed, error_of, is_in_parts=True)
OLD_EMBEDDINGS = Surface(partial(OllamaEmbedding, is_old=True), _embed, error_of, is_in_parts=True)
