"""Calls of tools as Kimi K2 writes them: JSON behind an id of the model's own, which counts over the whole chat.

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{...}<|tool_call_end|>...
<|tool_calls_section_end|>
"""

from __future__ import annotations

import re

from mdi.text.answers.calls import CallForm, Head
from mdi.text.answers.written import NAME, NUMBER, Written

CALLS = "<|tool_calls_section_begin|>"
_CALL, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
_END_OF_CALL, _END_OF_CALLS = "<|tool_call_end|>", "<|tool_calls_section_end|>"
MARKS = (CALLS, _CALL, _ARGUMENTS, _END_OF_CALL, _END_OF_CALLS)
_HEAD: Head = (
    re.compile(
        rf"\s*(?:{re.escape(_CALL)}\s*)?(?P<id>(?:functions\.)?(?P<name>[\w.-]{{1,64}}):\d{{1,9}})\s*"
        rf"{re.escape(_ARGUMENTS)}\s*(?=\{{)",
        re.ASCII,
    ),
    re.compile(r"[\w\s.:<>|-]*", re.ASCII),
)
KIMI_CALLS = CallForm(
    heads={CALLS: _HEAD, _CALL: _HEAD}, behind=(_END_OF_CALL, _END_OF_CALLS),
    written=Written(f"{CALLS}{_CALL}functions.{NAME}:{NUMBER}{_ARGUMENTS}", f"{_END_OF_CALL}{_END_OF_CALLS}"),
)  # fmt: skip
