"""Calls of tools as DeepSeek's models write them: JSON between marks.

Around all of them: <｜tool▁calls▁begin｜>...<｜tool▁calls▁end｜>
V3, R1: <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME ```json {...} ```<｜tool▁call▁end｜>
V3.1: <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>

JSON alone says where a call ends: a mark in an argument is a part of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mdi.text.answers.calls import CallForm, Head
from mdi.text.answers.written import NAME, Written

CALLS = "<｜tool▁calls▁begin｜>"
_CALL, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_END_OF_CALL, _END_OF_CALLS = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
MARKS = (CALLS, _CALL, _SEPARATOR, _END_OF_CALL, _END_OF_CALLS)
_HEAD: Head = (
    re.compile(
        rf"\s*(?:{_CALL}\s*)?(?:function{_SEPARATOR})?(?P<name>[\w.-]{{1,64}})(?:{_SEPARATOR}|\s*```json)\s*(?=\{{)",
        re.ASCII,
    ),
    re.compile(r"[\w\s.<>｜▁`-]*", re.ASCII),
)
_FENCED = (f"```{_END_OF_CALL}", f"```\n{_END_OF_CALL}")
BLOCK = "```json"  # before the arguments, as R1 and V3 write them
_BEGIN, _END = f"{CALLS}{_CALL}", f"{_END_OF_CALL}{_END_OF_CALLS}"
DEEPSEEK_CALLS = CallForm(
    heads={CALLS: _HEAD, _CALL: _HEAD}, behind=(*_FENCED, _END_OF_CALL, _END_OF_CALLS),
    written=Written(f"{_BEGIN}{NAME}{_SEPARATOR}", _END),
)  # fmt: skip
DEEPSEEK_BLOCKS = replace(
    DEEPSEEK_CALLS, written=Written(f"{_BEGIN}function{_SEPARATOR}{NAME}\n{BLOCK}\n", f"\n```{_END}")
)


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages of a chat as the models' templates want them: V3's writes calls only where the content is null."""
    return [{**one, "content": one.get("content") or None} if one.get("tool_calls") else one for one in messages]
