"""Options that do not go together: the table against the commands, and against itself."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from mdi.cli import COMMANDS, launch, parser_of
from mdi.errors import Code, UsageError
from mdi.run.choice import Choice
from mdi.spec.combinations import CHUNKS, OWN_RING, RULES, Rule, facts_of, refuse
from mdi.spec.options import Options, ParallelOptions
from mdi.spec.parser import Declared, Parser

VALUES = {
    "--ckpt": "a-folder", "--config": "a-config", "--weights": "map", "--layers": "1,1", "--adapter": "a-folder",
    "--verify": "0.5", "--hot-spare": "secondary0", "--swarm": "127.0.0.1:1", "--placement": "even", "--nodes-config": "a-file",
    "--profiles": "a-folder", "--model": "a-name", "--chunk": "a-file", "--dial": "127.0.0.1:1", "--peer": "127.0.0.1:1",
    "--memory": "700MB", "--spare-memory": "1G", "--tls-cert": "a-file", "--tls-key": "a-file", "--export": "hf",
    "--out": "a-folder", "--quantize": "int8", "--quantize-head": "int8",
}  # fmt: skip


class Pair(NamedTuple):
    """A rule and one of its others, as a command has them."""

    command: str
    module: ModuleType
    rule: Rule
    other: str

    @property
    def positional(self) -> list[str]:
        return ["a-model"] if self.command in ("prepare-model", "pull") else []

    def typed(self, fact: str) -> list[str]:
        flag, _, value = fact.partition(" ")
        option = options_in(parser_in(self.command))[flag]
        value = "" if option.type is bool else value or VALUES.get(flag, "2")
        return [flag, value] if value else [flag]


def parser_in(command: str) -> Parser:
    return parser_of(importlib.import_module(COMMANDS[command][0]), command)


def options_in(parser: Parser) -> dict[str, Declared]:
    return {option.fact: option for option in parser.declared.values()}


def pairs() -> list[Pair]:
    """All whose flags a command has, without what only a run knows."""
    found = []
    for command, (name, _) in COMMANDS.items():
        has = options_in(parser_in(command))
        for rule in RULES:
            others = [other for other in rule.others if other.partition(" ")[0] in has]
            if rule.what.partition(" ")[0] in has and not rule.given:
                found += [Pair(command, importlib.import_module(name), rule, other) for other in others]
    return found


PAIRS = pairs()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.command}: {pair.rule.what}, {pair.other}")
def test_a_command_refuses_what_the_table_refuses(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it begins, so nothing has been loaded, and nobody asked."""
    begun: list[Any] = []
    monkeypatch.setattr(pair.module, "run", lambda options: begun.append(options) or 0)
    rule, other = pair.rule, [] if pair.rule.is_need else pair.typed(pair.other)
    status = launch(pair.command, [*pair.positional, *pair.typed(rule.what), *other])
    told = rule.text.format(what=rule.what, found=" or ".join(rule.others) if rule.is_need else pair.other)
    assert (status, begun) == (2, []) and told in capsys.readouterr().err
    if rule.is_need:
        also = [text for one in RULES if one.what == pair.other and one.is_need for text in pair.typed(one.others[0])]
        assert (
            launch(pair.command, [*pair.positional, *pair.typed(rule.what), *pair.typed(pair.other), *also]) == 0
            and begun
        )


def test_the_table_is_about_flags_that_there_are() -> None:
    flags = {flag for command in COMMANDS for flag in options_in(parser_in(command))}
    named = {fact.partition(" ")[0] for rule in RULES for fact in (rule.what, *rule.others) if fact.startswith("--")}
    assert named <= flags and len(PAIRS) > 60
    reached = {(pair.rule.what, pair.other) for pair in PAIRS}
    of_flags = {
        (rule.what, other) for rule in RULES for other in rule.others
        if not rule.given and rule.what[0] == "-" and other[0] == "-"
    }  # fmt: skip
    assert of_flags <= reached


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_refuses_its_own_defaults(command: str) -> None:
    parser = parser_in(command)
    given = {action.dest: action.default for action in parser._actions if action.dest not in ("help", "version")}
    assert Options(declared=tuple(parser.declared.values())).with_given(given)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.what}, {rule.others[0]}")
def test_what_breaks_a_rule(rule: Rule) -> None:
    """Each of the others alone, and all of them; what a fact is called is in the error; without the fact nothing is refused."""
    called = {fact: f"<{fact}>" for fact in (rule.what, *rule.given)}
    needed = {one.others[0]: "" for one in RULES if one.what == rule.what and one.is_need}
    for others in [*((other,) for other in rule.others), rule.others]:
        found = {other: f"<{other}>" for other in others}
        if rule.is_need:
            refuse(called | found, rule.what)
        else:
            with pytest.raises(UsageError) as caught:
                refuse(called | needed | found, rule.what)
            assert all(words in str(caught.value) for words in found.values()) and caught.value.code is not Code.FAILED
        refuse(found, rule.what)
        for fact in rule.given:
            refuse({name: words for name, words in (called | found).items() if name != fact}, rule.what)
    if rule.is_need:
        with pytest.raises(UsageError, match=" or ".join(rule.others)):
            refuse(called, rule.what)


def test_options_within_options_are_facts() -> None:
    found = facts_of(Options(parallel=ParallelOptions("tensor"), replay_memory=0, fixed=True))
    assert {"--parallel tensor", "--parallel", "--replay-memory 0", "--fixed"} <= found.keys()
    assert not facts_of(Options())


@pytest.mark.parametrize("command", ["serve", "score", "finetune"])
def test_a_ring_of_processes_has_no_nodes_file(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(Choice, "open", lambda *_: pytest.fail("something is loaded"))
    more = {"score": ["--text", "abc"], "finetune": ["--out", str(tmp_path), "--data", "a-file"]}.get(command, [])
    assert launch(command, ["--nodes", "2", "--nodes-config", "a-file", *more]) == 2
    assert f"{OWN_RING} is one of its own" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--quantize", "--quantize-head"])
def test_a_format_of_chunks_is_for_a_number_of_nodes(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("prepare-model", ["nowhere", flag, "int8"]) == 2
    assert f"{flag} makes smaller chunks" in capsys.readouterr().err and CHUNKS
