"""Which form the answers of a model have: decided here alone, by its chat template and its special tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mdi.text.answers import calls, deepseek, gemma, harmony, kimi, marked, think
from mdi.text.answers.calls import CallForm, Calls
from mdi.text.answers.events import Parser, Tools
from mdi.text.answers.harmony import Channels
from mdi.text.answers.think import Thoughts
from mdi.text.answers.written import Functions

Messages = Sequence[Mapping[str, Any]]


def _as_they_are(messages: Messages) -> Messages:
    return messages


@dataclass(frozen=True)
class Form:
    """How a model writes answers, and wants its chats.

    Attributes:
        special: the marks that are special tokens, which have no text; letters that read the same are no marks.
        first: makes the parser of a form of its own.
        thinks: the marks around reasoning; None: it is not told apart.
        calls: how it writes calls.
        messages, tools: for the template.
        quiet: what a prompt goes on with for an answer without reasoning that is no call.
        is_plain: whether the model has no template: the prompt ends without a blank, which an answer begins with.
    """

    special: tuple[str, ...] = ()
    first: Callable[[Tools | None, bool], Parser] | None = None
    thinks: tuple[str, str] | None = None
    calls: CallForm = CallForm()
    messages: Callable[[Messages], Messages] = _as_they_are
    tools: Callable[[Tools], Tools] = _as_they_are
    quiet: str = ""
    is_plain: bool = False

    def parsers(
        self, tools: Tools | None, begins_in_reasoning: bool, is_call: bool, streams_calls: bool = False
    ) -> list[Parser]:  # fmt: skip
        """What an answer goes through: the text of each is the next one's. See AnswerStream."""
        found: list[Parser] = [self.first(tools, streams_calls)] if self.first is not None else []
        found += [Thoughts(begins_in_reasoning, self.thinks)] if self.thinks is not None else []
        return [*found, Calls(tools, self.calls, is_call, streams_calls)] if tools else found

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends with the mark behind which a model reasons."""
        return self.thinks is not None and prompt.rstrip().endswith(self.thinks[0])

    def demanded(self, functions: Functions, special: Mapping[str, int]) -> str | None:
        """The grammar of an answer that is a call of one of the functions; None: this form has none for them.

        Args:
            special: the tokenizer's special tokens.
        """
        written = self.calls.written
        return None if written is None else written.grammar(functions, special)


HARMONY = Form(
    harmony.MARKS, Channels, calls=harmony.HARMONY_CALLS, messages=harmony.template_messages, tools=harmony.template_tools,
    quiet=harmony.FINAL,
)  # fmt: skip
_DEEPSEEK = Form(thinks=think.MARKS, calls=deepseek.DEEPSEEK_CALLS, messages=deepseek.template_messages)
WORDS = Form()
PLAIN = Form(is_plain=True)
_CALLS_BY_MARKS = {  # the first whose marks the template has
    ("<arg_key>",): Form(thinks=think.MARKS, calls=marked.GLM_CALLS),
    (marked.MINIMAX,): Form(thinks=think.MARKS, calls=marked.MINIMAX_CALLS),
    (kimi.CALLS,): Form(calls=kimi.KIMI_CALLS),
    (deepseek.CALLS, deepseek.BLOCK): replace(_DEEPSEEK, calls=deepseek.DEEPSEEK_BLOCKS),
    (deepseek.CALLS,): _DEEPSEEK,
    (gemma.CALL,): Form(calls=gemma.GEMMA_CALLS),
    ("<tool_call>", "<function="): Form(calls=calls.CODER_CALLS),
    ("[TOOL_CALLS]", "[ARGS]"): Form(calls=calls.MISTRAL_CALLS, messages=calls.mistral_messages),
    ("[TOOL_CALLS]",): Form(calls=calls.MISTRAL_LISTS, messages=calls.mistral_messages),
    ("<tool_call>",): Form(calls=calls.HERMES_CALLS),
    ('"parameters": dictionary',): Form(calls=calls.LLAMA_CALLS),
}
_THOUGHTS_BY_MARK = {
    think.THINK: think.MARKS, think.END_OF_THINK: think.MARKS, think.MISTRAL[0]: think.MISTRAL, gemma.THOUGHT[0]: gemma.THOUGHT,
}  # fmt: skip
# By the names of --tool-parser.
PARSERS = {
    "deepseek": _DEEPSEEK,
    "gemma4": Form(calls=gemma.GEMMA_CALLS),
    "glm": Form(calls=marked.GLM_CALLS),
    "harmony": HARMONY,
    "hermes": Form(calls=calls.HERMES_CALLS),
    "kimi_k2": Form(calls=kimi.KIMI_CALLS),
    "llama3": Form(calls=calls.LLAMA_CALLS),
    "minimax_m2": Form(calls=marked.MINIMAX_CALLS),
    "mistral": Form(calls=calls.MISTRAL_CALLS),
    "mistral_list": Form(calls=calls.MISTRAL_LISTS),
    "qwen3_coder": Form(calls=calls.CODER_CALLS),
}
SPOKEN = frozenset(  # marks that are text, also where they are special tokens
    (*think.MARKS, *think.MISTRAL, *calls.MARKS, *marked.MARKS, *deepseek.MARKS, *kimi.MARKS, *gemma.MARKS)
)
ENDS = (*harmony.ENDS, gemma.RESULT)  # special marks that end an answer


def form_of(template: str | None, special: Collection[str], parser: str = "") -> Form:
    """Of a chat template (None: the model has none) and the special marks that the tokenizer has.

    Args:
        parser: one of PARSERS, whose form of calls counts in the place of the template's.
    """
    found = _form_by(template, special)
    if not parser:
        return found
    wanted = PARSERS[parser]
    if wanted.special:
        return wanted if {*wanted.special} <= {*special} else found
    return replace(WORDS if found.special else found, calls=wanted.calls)


def _form_by(template: str | None, special: Collection[str]) -> Form:
    if template is None:
        return PLAIN
    if "<|channel|>" in template and {*HARMONY.special} <= {*special}:
        return HARMONY
    form = next((form for marks, form in _CALLS_BY_MARKS.items() if all(mark in template for mark in marks)), WORDS)
    thinks = next((marks for mark, marks in _THOUGHTS_BY_MARK.items() if mark in template), form.thinks)
    return form if thinks == form.thinks else replace(form, thinks=thinks)


def special_marks(id_of: Callable[[str], int | None]) -> dict[int, str]:
    """The special marks of the forms that a tokenizer has all of, by their ids."""
    groups = [{mark: id_of(mark) for mark in marks} for marks in (HARMONY.special, (gemma.CALL, gemma.RESULT))]
    return {i: mark for group in groups if None not in group.values() for mark, i in group.items() if i is not None}
