"""Answers of GLM and MiniMax, between marks."""

from __future__ import annotations

from mutants.mutant import Mutant

TESTS = "tests/test_marked.py"

MUTANTS = [
    Mutant("numbers of tools stay texts", "text.marked:_value", "json.loads(text)", "text", TESTS),
    Mutant("all values are JSON", "text.marked:_value", 'schema.get("type") == "string"', "False", TESTS),
    Mutant("calls of no tool are calls", "marked_calls", 'call["name"] in names', "True", TESTS),
    Mutant("text beside a call is lost", "marked_calls", '_CALLS.sub("", text).strip()', "False", TESTS),
    Mutant("a prompt that ends in reasoning is not known", "Chat.prompts", "marked.THINK", "'!'", TESTS),
    Mutant("a demanded form is written in reasoning", "Chat.prompts", "marked.END_OF_THINK", '""', TESTS),
    Mutant("arguments go back as a text", "with_objects", 'm.get("tool_calls")', "False", TESTS),
    Mutant("thoughts within a text are reasoning", "MarkedStream._first_marks", "self._is_empty and", "True or", TESTS),
    Mutant("blanks before a mark are text", "MarkedStream._without_end", "text.rstrip()", "text", TESTS),
    Mutant(
        "GLM thinks where a form is demanded",
        "Chat.prompts",
        '"enable_thinking": False',
        '"enable_thinking": True',
        TESTS,
    ),
    Mutant("half a mark is shown", "text.marked:_place", "len(text) - longest", "len(text)", TESTS),
    Mutant(
        "special marks are not said",
        "_special_ids",
        "token.special and token.content not in _SPOKEN",
        "token.special",
        TESTS,
    ),
    Mutant("stop strings end reasoning", "MarkedStream._say", "self._mark == THINK", "False", TESTS),
]
