"""Tool calls: the tools of a request, their description for models without a template for them, and the model's calls."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mdi.serve.api_errors import invalid

MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
# How the beginning of an answer shows that it calls tools, in the families that there are.
MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function_call>")
BEGINNINGS = (*MARKS, "{", "[")
_BEGUN = re.compile(r'\s*(?:\[\s*)?\{\s*"name"\s*:\s*"([^"]*)')
# Beside these words, a schema's `properties` are not all that an object may have.
_JOINED = ("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "unevaluatedProperties")
_OF_NAMES = ("properties", "$defs", "definitions")  # words whose values hold schemas by name
_WRAPPED = re.compile(r"<(tool_call|function_call)>(.*?)(?:</\1>|$)", re.DOTALL)

INSTRUCTIONS = """\
You can call these functions:
{tools}
To call one, answer with nothing but a JSON object: {{"name": <name>, "arguments": <object>}}"""


@dataclass(frozen=True)
class ToolUse:
    """What a chat may call.

    Attributes:
        tools: as the request has them; () are none.
        forced: names of which one must be called; () leaves that to the model.
    """

    tools: tuple[dict[str, Any], ...] = ()
    forced: tuple[str, ...] = ()

    @property
    def grammar(self) -> dict[str, Any] | None:
        """The form of an answer that is a call."""
        if not self.forced:
            return None
        calls = []
        for tool in self.tools:
            function = tool["function"]
            if function["name"] in self.forced:
                arguments = _closed({"type": "object", "properties": {}, **(function.get("parameters") or {})})
                properties = {"name": {"const": function["name"]}, "arguments": arguments}
                required = ["name", "arguments"]
                calls.append(
                    {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
                )
        return {"type": "schema", "schema": calls[0] if len(calls) == 1 else {"anyOf": calls}}

    @property
    def instructions(self) -> str:
        return INSTRUCTIONS.format(tools="\n".join(json.dumps(tool["function"]) for tool in self.tools))

    def calls_in(self, text: str) -> list[dict[str, Any]]:
        """The calls that an answer consists of, as OpenAI writes them; [] if it is none."""
        names = {tool["function"]["name"] for tool in self.tools}
        calls = []
        for value in _objects(text.strip()):
            name = value.get("name")
            arguments = value.get("arguments", value.get("parameters", {}))
            if name not in names or not isinstance(arguments, dict | str):
                return []
            written = arguments if isinstance(arguments, str) else json.dumps(arguments)
            call = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
            calls.append({**call, "function": {"name": name, "arguments": written}})
        return calls

    def is_cut_call(self, text: str) -> bool:
        """Whether an answer that was cut off, and is no call, would have become one: nobody can use it."""
        if self.forced or text.lstrip().startswith(MARKS):
            return True
        begun = _BEGUN.match(text)
        return begun is not None and any(tool["function"]["name"].startswith(begun[1]) for tool in self.tools)

    def may_be_call(self, text: str) -> bool:
        """Whether an answer with this beginning may become a call, so that it must not be shown yet."""
        begun = text.lstrip()
        return bool(self.tools) and any(begun.startswith(one[: len(begun)]) for one in BEGINNINGS)


def parse_tools(given: Any, choice: Any) -> ToolUse:
    """The fields `tools` and `tool_choice`. Raises ApiError."""
    if given is None:
        given = []
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise invalid("tools", f"expected a list of at most {MOST_TOOLS}")
    names = []
    for tool in given:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise invalid("tools", 'expected objects {"type": "function", "function": {...}}')
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise invalid("tools", "a function's name has 1 to 64 letters, digits, dots, dashes and underscores")
        if parameters is not None and not isinstance(parameters, dict):
            raise invalid("tools", f"the parameters of {name} are no JSON schema")
        names.append(name)
    if choice in (None, "auto"):
        return ToolUse(tuple(given))
    if choice == "none":
        return ToolUse()
    if choice == "required" and names:
        return ToolUse(tuple(given), tuple(names))
    function = choice.get("function") if isinstance(choice, dict) else None
    wanted = function.get("name") if isinstance(function, dict) else None
    if wanted in names:
        return ToolUse(tuple(given), (str(wanted),))
    raise invalid("tool_choice", "expected none, auto, required, or one of the tools")


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
    if isinstance(closed.get("properties"), dict) and not any(word in closed for word in _JOINED):
        closed.setdefault("additionalProperties", False)
    return closed


def _objects(text: str) -> Sequence[Mapping[str, Any]]:
    """The JSON objects that a text consists of, whatever a model family writes around them; [] if it has other text."""
    wrapped = _WRAPPED.findall(text)
    if wrapped:
        values = [_parsed(inner) for _, inner in wrapped]
    else:
        for beginning in ("[TOOL_CALLS]", "<|python_tag|>"):
            text = text.removeprefix(beginning).strip()
        value = _parsed(text)
        values = value if isinstance(value, list) else [value]
    return values if all(isinstance(value, dict) for value in values) else []


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
