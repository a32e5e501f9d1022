"""Restricts the next tokens so that a text matches a JSON schema, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mdi.errors import EngineError, UsageError


class GrammarSource:
    """Makes constraints for the texts of one model.

    Args:
        directory: of its tokenizer.
        eos_ids: tokens that end a text.
        n_vocabulary: ids that the model knows; there may be more than the tokenizer has.

    Raises:
        UsageError: the tokenizer has a form that llguidance does not read, or llguidance is not installed.
    """

    def __init__(self, directory: Path, eos_ids: Iterable[int], n_vocabulary: int) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise UsageError("response_format needs a model with a tokenizer.json")
        try:
            import llguidance
        except ModuleNotFoundError:
            raise UsageError("response_format needs the library llguidance: pip install llguidance") from None
        self._n_vocabulary = n_vocabulary
        self._eos_ids = sorted(eos_ids)
        eos = self._eos_ids[0] if self._eos_ids else None
        self._llguidance = llguidance
        self._tokenizer = llguidance.LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=n_vocabulary, eos_token=eos)

    def constraint(self, wanted: Mapping[str, Any]) -> Grammar:
        """Of one text. Raises UsageError if the schema cannot be used. Some take minutes, or end this process: those must
        not come here (`mdi.text.limited`).
        """
        schema = json.dumps(wanted["schema"])
        matcher = self._llguidance.LLMatcher
        try:
            form = matcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        except ValueError as e:
            raise UsageError(f"the JSON schema cannot be used: {' '.join(str(e).split())[:200]}") from None
        made = matcher(self._tokenizer, form, log_level=0)
        if made.is_error():
            raise UsageError(f"the JSON schema cannot be used: {_error_of(made)}")
        grammar = Grammar(made, self._eos_ids, self._n_vocabulary)
        try:
            grammar.allowed()
        except EngineError as e:
            raise UsageError("the JSON schema cannot be used: no text matches it") from e
        return grammar


class Grammar:
    """A `mdi.engine.sequence.Constraint`."""

    def __init__(self, matcher: Any, eos_ids: list[int], n_vocabulary: int) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._n_vocabulary = n_vocabulary

    def allowed(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.zeros(self._n_vocabulary, dtype=bool)
        known = np.unpackbits(bits, bitorder="little")[: self._n_vocabulary].astype(bool)
        allowed[: len(known)] = known
        allowed[self._eos_ids] = self._matcher.is_accepting()
        if self._matcher.is_error() or not allowed.any():
            raise EngineError(f"no token may follow: {_error_of(self._matcher) or 'the grammar is at its end'}")
        return allowed

    def take(self, token: int) -> bool:
        if not self._matcher.consume_token(token):
            raise EngineError(f"a token does not match: {_error_of(self._matcher)}")
        return bool(self._matcher.is_stopped())

    def copy(self) -> Grammar:
        return Grammar(self._matcher.deep_copy(), self._eos_ids, self._n_vocabulary)

    def n_valid(self, tokens: list[int]) -> int:
        return int(self._matcher.validate_tokens(tokens))

    def forced(self) -> list[int]:
        return list(self._matcher.compute_ff_tokens())


def _error_of(matcher: Any) -> str:
    """Without the parser's state and the whole grammar, which follow in lines of their own."""
    return str(matcher.get_error()).partition("\n")[0][:200]
