"""Grammars that take long: they end their own text, and others hardly wait."""

from __future__ import annotations

import numpy as np
import pytest
from test_guesses import NANO

from mdi.errors import EngineError
from mdi.serve.grammar import ALL_S, ALL_SHARE, REQUEST_S, USUAL_S, Grammar, GrammarSource
from mdi.text.answers.calls import Calls
from mdi.text.answers.events import Call
from mdi.text.answers.forms import PARSERS
from mdi.text.texts import TextCodec

LETTERS = 25  # 19 with the limit, 31 without
SCHEMA = {"type": "string", "maxLength": 1000}
STEEP = "^((a{1,200}){1,200}){1,200}$"


class Clock:
    """Each question takes `each_s`: a question looks twice, where it begins and where it ends."""

    def __init__(self, each_s: float = 0.0) -> None:
        self.each_s = each_s
        self.n_looks = 0
        self._at_s = 0.0

    def __call__(self) -> float:
        self._at_s += self.each_s * (self.n_looks % 2)
        self.n_looks += 1
        return self._at_s


class Time:
    at_s = 0.0

    def __call__(self) -> float:
        return self.at_s


def source(clock: Clock, now: Time | None = None) -> GrammarSource:
    eos_ids = TextCodec.from_checkpoint(NANO, prompt_style="none").eos_ids
    return GrammarSource(NANO, eos_ids, 2048, clock, now or Time())


def n_answers(grammar: Grammar, most: int = 10_000) -> int:
    """Questions that are answered, before one is refused."""
    for n in range(most):
        try:
            grammar.allowed()
        except EngineError:
            return n
    return most


def test_a_grammar_that_takes_long_ends_its_text() -> None:
    clock = Clock(USUAL_S + REQUEST_S / 9.5)
    grammar = source(clock).constraint({"schema": SCHEMA}, 1)
    assert clock.n_looks == 0, "before the text begins nothing is counted"
    assert n_answers(grammar) == 10
    looks = clock.n_looks
    assert grammar.forced() == [] and grammar.n_valid([1]) == 0, "guesses are none any more"
    assert n_answers(grammar) == 0 and clock.n_looks == looks


def test_what_is_usual_ends_no_text() -> None:
    grammar = source(Clock(USUAL_S * 0.99)).constraint({"schema": SCHEMA}, 1)
    assert n_answers(grammar, 500) == 500


@pytest.mark.parametrize("question", ["take", "copy", "n_valid", "forced"])
def test_each_question_counts(question: str) -> None:
    clock = Clock()
    grammar = source(clock).constraint({"schema": SCHEMA}, 1)
    token = int(np.flatnonzero(grammar.allowed())[0])
    ask = {
        "take": lambda: grammar.take(token),
        "copy": grammar.copy,
        "n_valid": lambda: grammar.n_valid([token]),
        "forced": grammar.forced,
    }[question]
    clock.each_s = REQUEST_S + 2 * USUAL_S
    ask()
    assert n_answers(grammar) == 0


def test_choices_of_a_request_count_together_and_other_requests_do_not() -> None:
    clock = Clock(USUAL_S + REQUEST_S / 9.5)
    made = source(clock)
    first, second, other = (made.constraint({"schema": SCHEMA}, request) for request in (1, 1, 2))
    copied = second.copy()
    for grammar in (first, second, copied) * 3:
        grammar.allowed()
    assert [n_answers(grammar) for grammar in (first, second, copied)] == [0, 0, 0]
    assert n_answers(other) == 10


def test_the_schema_of_a_request_is_compiled_once() -> None:
    made = source(Clock())
    first = made.constraint({"schema": SCHEMA}, 1)
    first.take(int(np.flatnonzero(first.allowed())[0]))
    another = {"schema": {"type": "number"}}  # which one it is, the number of the request says
    second, other = made.constraint(another, 1), made.constraint(another, 2)
    begins = made.constraint({"schema": SCHEMA}, 3).allowed()
    assert (second.allowed() == begins).all() and (other.allowed() != begins).any()
    del first, second
    assert (made.constraint(another, 1).allowed() == other.allowed()).all(), "no text of the request is left"


def test_requests_together_hold_up_the_engine_for_a_share_of_the_time() -> None:
    clock, now = Clock(USUAL_S + ALL_S / 9.5), Time()
    made = source(clock, now)
    grammars = [made.constraint({"schema": SCHEMA}, request) for request in range(40)]
    quick = made.constraint({"schema": SCHEMA}, 100)
    answered = [n_answers(grammar) for grammar in grammars]
    assert sum(answered) < 10 + 40, "each may ask once more, and no more"
    assert sum(answered[:4]) > 10 and set(answered[4:]) == {1}
    clock.each_s = USUAL_S
    assert n_answers(quick, 100) == 100, "a grammar that is quick is not ended for others"
    clock.each_s = USUAL_S + REQUEST_S / 9.5
    now.at_s += 100 * ALL_S / ALL_SHARE
    assert n_answers(made.constraint({"schema": SCHEMA}, 200)) == 10


def test_a_pattern_that_grows_with_each_letter_is_given_up_soon() -> None:
    """Whatever the time: llguidance counts what it builds for a token."""
    made = source(Clock())
    grammar = made.constraint({"schema": {"type": "string", "pattern": STEEP}}, 1)
    grammar.take(int(np.flatnonzero(grammar.allowed())[0]))  # the quotation mark
    letter = next(int(i) for i in np.flatnonzero(grammar.allowed()) if grammar.n_valid([int(i)] * 2) == 2)
    with pytest.raises(EngineError):
        for _ in range(LETTERS):
            grammar.allowed()
            grammar.take(letter)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "kimi_k2", "gemma4"])
def test_the_engine_holds_a_demanded_call_to_its_form(name: str) -> None:
    """Each token is the first that may follow; the model's own tokenizer writes the marks as letters."""
    codec = TextCodec.from_checkpoint(NANO, prompt_style="none")
    schema = {"type": "object", "properties": {"act": {"type": "string", "enum": ["one"]}}, "required": ["act"]}
    lark = PARSERS[name].demanded([("open", {**schema, "additionalProperties": False})], codec.special_ids)
    grammar, ids = source(Clock()).constraint({"type": "lark", "lark": lark}, 1), list[int]()
    while not (allowed := grammar.allowed())[sorted(codec.eos_ids)[0]]:
        ids.append(int(np.flatnonzero(allowed)[-1]))
        assert len(ids) < 200
        grammar.take(ids[-1])
    parser = Calls([{"function": {"name": "open", "parameters": schema}}], PARSERS[name].calls)
    (call,) = [*parser.feed(codec.decode(ids)), *parser.close(False)]
    assert isinstance(call, Call) and (call.name, call.arguments) == ("open", '{"act": "one"}')
