"""Tools that a chat may call, as OpenAI's API has them: their form, which must be called, and how a call is demanded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mdi.serve.api_errors import invalid, tell_ignored
from mdi.text.answers.written import JOINED

MOST_TOOLS = 128
LONGEST_TOOLS = 1 << 20  # characters of all of them; each goes through the chat's template
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_OF_NAMES = ("properties", "$defs", "definitions")  # words whose values hold schemas by name
_VALUES = ("const", "enum", "default", "examples")  # words whose values are no schemas

INSTRUCTIONS = """\
You can call these functions:
{tools}
To call one, answer with nothing but a JSON object: {{"name": <name>, "arguments": <object>}}"""


Place = Callable[[int, str], str]  # how a request names a field of the function with this number


def _in_functions(number: int, name: str) -> str:
    """As OpenAI's chats have it."""
    return f"tools[{number}].function.{name}"


@dataclass(frozen=True)
class ToolUse:
    """Tools that a chat may call.

    Attributes:
        tools: as the request has them; () are none.
        forced: names of which one must be called; () leaves that to the model.
        place: see Place.
    """

    tools: tuple[dict[str, Any], ...] = ()
    forced: tuple[str, ...] = ()
    place: Place = field(default=_in_functions, compare=False)

    @property
    def demanded(self) -> list[tuple[str, dict[str, Any]]]:
        """The names of those that must be called, and the schemas of their arguments."""
        functions = [tool["function"] for tool in self.tools if tool["function"]["name"] in self.forced]
        empty = {"type": "object", "properties": {}}
        return [(one["name"], _closed({**empty, **(one.get("parameters") or {})})) for one in functions]

    @property
    def grammar(self) -> dict[str, Any] | None:
        """The form of an answer that is a call: as JSON alone, for models whose form has no grammar."""
        if not self.forced:
            return None
        functions, calls = self.demanded, []
        for number, (name, arguments) in enumerate(functions):
            place = "#/properties/arguments" if len(functions) == 1 else f"#/anyOf/{number}/properties/arguments"
            properties = {"name": {"const": name}, "arguments": _moved(arguments, place)}
            required = ["name", "arguments"]
            calls.append(
                {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
            )
        names = [tool["function"]["name"] for tool in self.tools]
        param = self.place(names.index(self.forced[0]), "parameters") if len(calls) == 1 else "tools"
        return {"type": "schema", "schema": calls[0] if len(calls) == 1 else {"anyOf": calls}, "param": param}

    @property
    def instructions(self) -> str:
        return INSTRUCTIONS.format(
            tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in self.tools)
        )


def parse_tools(given: Any, choice: Any, place: Place = _in_functions) -> ToolUse:
    """The fields `tools` and `tool_choice`. Raises ApiError, with the name of the field that is wrong."""
    if given is None:
        given = []
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise invalid("tools", f"expected a list of at most {MOST_TOOLS}")
    if len(json.dumps(given)) > LONGEST_TOOLS:
        raise invalid("tools", f"they have more than {LONGEST_TOOLS} characters")
    names = []
    for number, tool in enumerate(given):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise invalid(f"tools[{number}]", 'expected an object {"type": "function", "function": {...}}')
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise invalid(place(number, "name"), "expected 1 to 64 letters, digits, dots, dashes and underscores")
        if parameters is not None and not isinstance(parameters, dict):
            raise invalid(place(number, "parameters"), f"expected a JSON schema, which is an object, for {name}")
        if not isinstance(function.get("description") or "", str):
            raise invalid(place(number, "description"), "expected a text")
        names.append(name)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed_tools(given, names, choice.get("allowed_tools"))
    if choice in (None, "auto"):
        return ToolUse(tuple(given))
    if choice == "none":
        return ToolUse()
    if choice == "required" and names:
        return ToolUse(tuple(given), tuple(names), place)
    function = choice.get("function") if isinstance(choice, dict) else None
    wanted = function.get("name") if isinstance(function, dict) else None
    if wanted in names:
        return ToolUse(tuple(given), (str(wanted),), place)
    raise invalid("tool_choice", "expected none, auto, required, or one of the tools")


def functions_of(given: Any, path: str, kinds: Sequence[str | None], parameters: str) -> Any:
    """Tools that have their names in themselves, as `parse_tools` takes them; those of other kinds are left out.

    Args:
        path: of the API.
        kinds: which types of its tools are functions; None: no type.
        parameters: the field with the schema.
    """
    if not isinstance(given, list):
        return given
    if not all(isinstance(tool, dict) for tool in given):
        raise invalid("tools", f'expected objects {{"name": ..., "{parameters}": ...}}')
    if others := {str(tool.get("type")) for tool in given if tool.get("type") not in kinds}:
        tell_ignored(f"tools of {path}", others)
    fields = {"name": "name", "description": "description", "parameters": parameters}
    return [
        {"type": "function", "function": {to: tool[of] for to, of in fields.items() if tool.get(of) is not None}}
        for tool in given
        if tool.get("type") in kinds
    ]


def flat_tools(given: Any, choice: Any, path: str, kinds: Sequence[str | None], parameters: str) -> ToolUse:
    """Such tools; the choice is as chats have it. Raises ApiError, with the name of the field that is wrong."""
    functions = functions_of(given, path, kinds, parameters)
    numbers = [i for i, tool in enumerate(given) if tool.get("type") in kinds] if isinstance(given, list) else []
    return parse_tools(
        functions, choice, lambda i, name: f"tools[{numbers[i]}].{parameters if name == 'parameters' else name}"
    )


def flat_choice(given: Any, path: str, kinds: Sequence[str | None], parameters: str) -> Any:
    """A `tool_choice` with the names of such tools, as chats have it."""
    if not isinstance(given, dict) or given.get("type") not in ("function", "allowed_tools"):
        return given
    if given["type"] == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    allowed = {"mode": given.get("mode"), "tools": functions_of(given.get("tools"), path, kinds, parameters)}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _allowed_tools(tools: list[dict[str, Any]], names: list[str], allowed: Any) -> ToolUse:
    """Of a `tool_choice` {"type": "allowed_tools", "allowed_tools": {"mode": auto or required, "tools": some of the tools}}."""
    mode, given = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    functions = [one.get("function") for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    wanted = [function.get("name") for function in functions if isinstance(function, dict)]
    if mode not in ("auto", "required") or not wanted or any(name not in names for name in wanted):
        raise invalid("tool_choice", "allowed_tools needs a mode, auto or required, and some of the tools")
    kept = [tool for tool in tools if tool["function"]["name"] in wanted]
    return parse_tools(kept, mode)


def _closed(schema: Any) -> Any:
    """A schema whose objects have the keys of `properties` only, unless it says so: a weak model invents others for ever."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        word: {name: _closed(one) for name, one in value.items()}
        if word in _OF_NAMES and isinstance(value, dict)
        else _closed(value)
        if word in ("items", "prefixItems", "additionalProperties")
        else value
        for word, value in schema.items()
    }
    if isinstance(closed.get("properties"), dict) and not any(word in closed for word in JOINED):
        closed.setdefault("additionalProperties", False)
    return closed


def _moved(schema: Any, place: str) -> Any:
    """A schema that now stands at this place of another one: its references mean the same parts of it as before."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        word: place + value[1:]
        if word == "$ref" and isinstance(value, str) and value.startswith("#")
        else {name: _moved(one, place) for name, one in value.items()}
        if word in _OF_NAMES and isinstance(value, dict)
        else value
        if word in _VALUES
        else _moved(value, place)
        for word, value in schema.items()
    }
