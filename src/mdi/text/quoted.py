"""Words of a chat that read like special tokens stay words.

A template writes special tokens by their names, and the tokenizer finds these names wherever they stand: also in what a user
says, the description of a tool, a page that a tool has read, or a file that a call writes. There they would end a turn, or
begin one of the system. So a character that occurs nowhere else is put into such a name before a chat is rendered, and the text
is cut there before it is tokenized. Names may overlap: each of them that begins anywhere is cut behind its first character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from mdi.errors import UsageError
from mdi.text.answers.calls import parsed_arguments

_PRIVATE = range(0xE000, 0xF900)  # characters that no script has
_DEPTH = 50  # of groups in a regular expression; Python reads and compiles them by recursion
_SAID = ("content", "reasoning_content", "reasoning")  # by the assistant


class Quotes:
    """Args:
    names: of the special tokens.
    """

    def __init__(self, names: Iterable[str]) -> None:
        rests: dict[str, list[str]] = {}  # of the names, by their first characters
        for name in names:
            if len(name) > 1:
                rests.setdefault(name[0], []).append(name[1:])
        begins = (f"{re.escape(first)}(?={one_of(rest)})" for first, rest in rests.items())
        self._begins = re.compile("|".join(begins)) if rests else None  # finds the first characters alone

    def quoted(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()
    ) -> tuple[list[dict[str, Any]], list[Any], str]:
        """The messages and the tools, as templates take them, and the character where their text is to be cut; "": nowhere.

        What the assistant has said is left as it is: models write special tokens in it. So are roles.

        Raises:
            UsageError: they have all characters that could be the one to cut at.
        """
        said = [[value for name, value in message.items() if _is_quoted(message, name)] for message in messages]
        said.append([_arguments(call) for message in messages for call in message.get("tool_calls") or ()])
        if self._begins is None or not any(map(self._begins.search, _texts([said, *tools]))):
            return [dict(message) for message in messages], list(tools), ""
        used = set("".join(_texts([*messages, said, *tools])))
        cut = next((chr(code) for code in _PRIVATE if chr(code) not in used), None)
        if cut is None:
            raise UsageError("the texts have all characters from U+E000 to U+F8FF: leave one of them out")
        return [self._with_cuts(message, cut) for message in messages], self.marked(list(tools), cut), cut

    def pieces(self, text: str) -> list[str]:
        """A text, cut within each name of a special token."""
        cuts = [] if self._begins is None else [found.end() for found in self._begins.finditer(text)]
        return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def _with_cuts(self, message: Mapping[str, Any], cut: str) -> dict[str, Any]:
        made = {
            name: self.marked(value, cut) if _is_quoted(message, name) else value for name, value in message.items()
        }
        if message.get("tool_calls"):
            made["tool_calls"] = [self._call_with_cuts(call, cut) for call in message["tool_calls"]]
        return made

    def _call_with_cuts(self, call: Any, cut: str) -> Any:
        """Its arguments stay JSON: marked are the values that they have."""
        made, given = self.marked(call, cut), _arguments(call)
        found = self.marked(given, cut)
        if given is not None and (found != given or made["function"]["arguments"] != call["function"]["arguments"]):
            written = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
            made["function"]["arguments"] = written
        return made

    def marked(self, value: Any, cut: str) -> Any:
        """A value of JSON with `cut` (see `quoted`) in the names of special tokens; "": as it is."""
        if isinstance(value, str) and self._begins is not None:
            return self._begins.sub(lambda found: found[0] + cut, value)
        if isinstance(value, dict):
            return {self.marked(key, cut): self.marked(one, cut) for key, one in value.items()}
        return [self.marked(one, cut) for one in value] if isinstance(value, list) else value


def one_of(texts: Sequence[str], depth: int = 0) -> str:
    """A regular expression for the beginnings of what begins with one of these texts.

    No two alternatives begin with the same character, so that a search does not try each of thousands of names.
    """
    if depth == _DEPTH:
        return "|".join(map(re.escape, texts))
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[0], []).append(text)
    found = []
    for group in groups.values():
        same = commonprefix(group)
        more = [text[len(same) :] for text in group]
        # where a text ends, the longer ones say nothing more
        found.append(re.escape(same) + ("" if "" in more else f"(?:{one_of(more, depth + 1)})"))
    return "|".join(found)


def _is_quoted(message: Mapping[str, Any], name: str) -> bool:
    """Whether a field of a message is quoted."""
    return name != "role" and not (message.get("role") == "assistant" and name in _SAID)


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
