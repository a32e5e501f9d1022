"""Which form the answers of a model have: decided here alone, by its chat template and its special tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mdi.text.answers import calls, deepseek, harmony, marked, think
from mdi.text.answers.calls import CallForm, Calls
from mdi.text.answers.events import Parser, Tools
from mdi.text.answers.harmony import Channels
from mdi.text.answers.think import Thoughts

Messages = Sequence[Mapping[str, Any]]


def _as_they_are(messages: Messages) -> Messages:
    return messages


@dataclass(frozen=True)
class Form:
    """How a model writes answers, and wants its chats.

    Attributes:
        special: the marks that are special tokens, which have no text; letters that read the same are no marks.
        first: makes the parser of a form of its own.
        thinks: whether reasoning stands in <think>.
        calls: how it writes calls.
        messages, tools: for the template.
        quiet: what a prompt goes on with for an answer without reasoning.
        is_plain: whether the model has no template: the prompt ends without a blank, which an answer begins with.
    """

    special: tuple[str, ...] = ()
    first: Callable[[Tools | None], Parser] | None = None
    thinks: bool = False
    calls: CallForm = CallForm()
    messages: Callable[[Messages], Messages] = _as_they_are
    tools: Callable[[Tools], Tools] = _as_they_are
    quiet: str = ""
    is_plain: bool = False

    def parsers(self, tools: Tools | None, begins_in_reasoning: bool, is_call: bool) -> list[Parser]:
        """What an answer goes through: the text of each is the next one's. See AnswerStream."""
        found: list[Parser] = [self.first(tools)] if self.first is not None else []
        found += [Thoughts(begins_in_reasoning)] if self.thinks else []
        return [*found, Calls(tools, self.calls, is_call)] if tools else found


WORDS = Form()
PLAIN = Form(is_plain=True)
_BY_TEMPLATE = {  # the first whose mark the template has
    "<|channel|>": Form(
        harmony.MARKS, Channels, messages=harmony.template_messages, tools=harmony.template_tools, quiet=harmony.FINAL
    ),
    "<arg_key>": Form(thinks=True, calls=marked.GLM_CALLS),
    marked.MINIMAX: Form(thinks=True, calls=marked.MINIMAX_CALLS),
    deepseek.CALLS: Form(thinks=True, calls=deepseek.DEEPSEEK_CALLS, messages=deepseek.template_messages),
    think.THINK: Form(thinks=True),
    think.END_OF_THINK: Form(thinks=True),
}
SPOKEN = frozenset(
    (*think.MARKS, *calls.MARKS, *marked.MARKS, *deepseek.MARKS)
)  # marks that are text, also where they are special tokens
ENDS = harmony.ENDS  # special marks that end an answer


def form_of(template: str | None, special: Collection[str]) -> Form:
    """Of a chat template (None: the model has none) and the special marks that the tokenizer has."""
    if template is None:
        return PLAIN
    found = (form for mark, form in _BY_TEMPLATE.items() if mark in template and {*form.special} <= {*special})
    return next(found, WORDS)


def special_marks(id_of: Callable[[str], int | None]) -> dict[int, str]:
    """The special marks of the forms that a tokenizer has all of, by their ids."""
    groups = [{mark: id_of(mark) for mark in form.special} for form in _BY_TEMPLATE.values()]
    return {i: mark for group in groups if None not in group.values() for mark, i in group.items() if i is not None}
