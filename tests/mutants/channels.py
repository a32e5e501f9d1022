"""Answers in channels."""

from __future__ import annotations

from mutants.mutant import Mutant

TESTS = "tests/test_harmony.py"

MUTANTS = [
    Mutant("reasoning is text", "ChannelStream._open", 'channel[1] == "analysis"', "False", TESTS),
    Mutant("calls are reasoning", "ChannelStream._open", '.startswith("functions.")', '.startswith("tools.")', TESTS),
    Mutant(
        "stop strings mean reasoning, too",
        "ChannelStream._say",
        "self._kind == _TEXT",
        "self._match(text) or True",
        TESTS,
    ),
    Mutant("messages run together", "text.harmony:_BETWEEN", '"\\n\\n"', '""', TESTS),
    Mutant("what is held back of a message is lost", "ChannelStream._close", "self._body.flush()", '""', TESTS),
    Mutant("an answer without channels is lost", "ChannelStream.flush", "not self._begun", "False", TESTS),
    Mutant("calls do not end answers", "TextCodec.__init__", '("<|return|>", "<|call|>")', '("<|return|>",)', TESTS),
    Mutant("calls that were cut off are calls", "Chat._others", 'piece.finish_reason != "length"', "True", TESTS),
    Mutant("calls of unknown tools are lost", "Chat._others", '"" if known else written', '""', TESTS),
    Mutant("a demanded form has reasoning before it", "Chat.prompts", "harmony.FINAL", '""', TESTS),
    Mutant(
        "arguments go back as texts",
        "with_objects",
        'parsed_arguments(function["arguments"])',
        'function["arguments"]',
        f"{TESTS} tests/test_templates.py",
    ),
    Mutant(
        "templates that write arguments as a text refuse the chat",
        "ChatTemplate.render",
        "found != given",
        "False",
        "tests/test_templates.py",
    ),
    Mutant(
        "reasoning goes back beside calls and words",
        "template_messages",
        'not (made.get("tool_calls") and made["content"])',
        "True",
        TESTS,
    ),
    Mutant("further calls of a message are lost", "_one_call_each", "len(calls) < 2", "True", TESTS),
    Mutant(
        "a tool without a description is refused by gpt-oss' template",
        "template_tools",
        'tool["function"].get("description") or ""',
        'tool["function"].get("description")',
        TESTS,
    ),
    Mutant(
        "empty fields of a message reach the template",
        "serve.chat:_messages",
        'value is not None and (key != "tool_calls" or calls)',
        "True",
        TESTS,
    ),
    Mutant(
        "a developer's message is lost",
        "_by_system",
        'message.get("role") == "developer"',
        "False",
        "tests/test_templates.py",
    ),
    Mutant(
        "the next prompt has the reasoning", "cli.chat:answer", "without_reasoning(sample.text)", "sample.text", TESTS
    ),
]
