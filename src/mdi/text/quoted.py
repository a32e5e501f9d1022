"""Words of a chat that read like special tokens stay words.

A template writes special tokens by their names, and the tokenizer finds these names wherever they stand: also in what a user
says, a page that a tool has read, or a file that a call writes. There they would end a turn, or begin one of the system. So a
character that occurs nowhere else is put into such a name before a chat is rendered, and the text is cut there before it is
tokenized.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mdi.text.answers.calls import parsed_arguments

_PRIVATE = range(0xE000, 0xF900)  # characters that no script has


class Quotes:
    """Args:
    names: of the special tokens.
    """

    def __init__(self, names: Iterable[str]) -> None:
        found = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, found))) if found else None

    def quoted(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """The messages, as templates take them, and the character where their text is to be cut; "": nowhere.

        What the assistant has said is left as it is: models write special tokens in it.
        """
        texts = [*_texts([message.get("content") for message in messages if not _is_models(message)])]
        texts += _texts([_arguments(call) for message in messages for call in message.get("tool_calls") or ()])
        if self._names is None or not any(map(self._names.search, texts)):
            return [dict(message) for message in messages], ""
        used = set("".join(texts))
        cut = next(chr(code) for code in _PRIVATE if chr(code) not in used)
        return [self._with_cuts(message, cut) for message in messages], cut

    def _with_cuts(self, message: Mapping[str, Any], cut: str) -> dict[str, Any]:
        made = dict(message)
        if not _is_models(message):
            made["content"] = self._marked(message.get("content"), cut)
        if message.get("tool_calls"):
            made["tool_calls"] = [self._call_with_cuts(call, cut) for call in message["tool_calls"]]
        return made

    def _call_with_cuts(self, call: Any, cut: str) -> Any:
        given = _arguments(call)
        found = self._marked(given, cut)
        if found == given:
            return call
        written = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": written}}

    def _marked(self, value: Any, cut: str) -> Any:
        if isinstance(value, str) and self._names is not None:
            return self._names.sub(lambda found: found[0][0] + cut + found[0][1:], value)
        if isinstance(value, dict):
            return {self._marked(key, cut): self._marked(one, cut) for key, one in value.items()}
        return [self._marked(one, cut) for one in value] if isinstance(value, list) else value


def _is_models(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant"


def _arguments(call: Any) -> Any:
    """Of a call in a request, where they are JSON: an object, if they are one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    given = function.get("arguments") if isinstance(function, Mapping) else None
    return parsed_arguments(given) if isinstance(given, str) else given


def _texts(value: Any) -> Iterator[str]:
    """All that are in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(one)
