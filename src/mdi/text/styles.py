"""Prompt styles: how a question is written for a model that was trained to chat, and what ends its answer.

styles.json has them as data, with the markers and system texts that each model was trained with. Names are those of litgpt,
whose class a checkpoint's prompt_style.yaml names; nothing that it names is imported.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

_TABLE = Path(__file__).with_name("styles.json")
_PROMPT = "{prompt}"
DEFAULT = "Default"  # the class that changes nothing


@dataclass(frozen=True)
class PromptStyle:
    """One style.

    Attributes:
        name: as --prompt-style has it.
        class_name: as prompt_style.yaml has it.
        form: a text with one question, which stands where {prompt} is.
        stops: runs of tokens (as text, or an id) that end an answer, besides the end of a text.
    """

    name: str
    class_name: str
    form: str
    stops: tuple[tuple[str | int, ...], ...] = ()
    is_complete: ClassVar = False  # the tokenizer adds what begins a text

    @property
    def knows_conversations(self) -> bool:
        return self.class_name in ("Llama3", "R1Base")

    def apply(self, prompt: str | Sequence[Mapping[str, str]]) -> str:
        """The text for a question, or for messages of user and assistant if the style knows conversations."""
        before, _, after = self.form.partition(_PROMPT)
        if isinstance(prompt, str):
            return before + prompt + after
        if self.class_name == "R1Base":
            marks = {"user": "<｜User｜>", "assistant": "<｜Assistant｜>"}
            return "".join(marks[m["role"]] + m["content"].strip() for m in prompt) + marks["assistant"]
        turn = "<|start_header_id|>{role}<|end_header_id|>\n\n"
        system = before.removesuffix(turn.format(role="user"))
        turns = [turn.format(role=m["role"]) + m["content"].strip() + "<|eot_id|>" for m in prompt]
        return system + "".join(turns) + turn.format(role="assistant")

    def stop_tokens(self, tokenizer: Any) -> list[list[int]]:
        """Ids of `stops`. Raises ValueError if the tokenizer lacks one."""
        return [[tokenizer.token_to_id(s) if isinstance(s, str) else s for s in run] for run in self.stops]

    def close(self) -> None:
        """Nothing: it has no process, other than a template."""


@functools.cache
def known_styles() -> dict[str, PromptStyle]:
    """All styles, by the lower-case names of style and class; of two styles with one name, the style's own counts."""
    styles = [
        PromptStyle(
            row.get("name", row["class"].lower()), row["class"], row["form"], tuple(map(tuple, row.get("stops", ())))
        )
        for row in _table()["styles"]
    ]
    return {**{style.class_name.lower(): style for style in styles}, **{style.name: style for style in styles}}


def style_of_model(model: str) -> PromptStyle | None:
    """The style of a chat model, by its name on the hub; None for others."""
    class_name = next((name for pattern, name in _table()["models"] if re.search(pattern, model)), None)
    return None if class_name is None else known_styles()[class_name.lower()]


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return table
