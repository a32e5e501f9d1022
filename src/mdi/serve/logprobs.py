"""Probabilities of tokens, in the two forms that OpenAI's endpoints have."""

from __future__ import annotations

from typing import Any

from mdi.serve.request_texts import TextPiece
from mdi.text import TextCodec

LEAST = -9999.0  # means "never": JSON has no infinity


class TextLogprobs:
    """Of one text of /v1/completions, as its pieces come."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._n_chars = 0
        self.all: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def take(self, piece: TextPiece) -> dict[str, list[Any]] | None:
        """What is new; None if nothing is."""
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
