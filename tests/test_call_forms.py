"""Calls in each form in which models write them, cut at every byte and at every token, whose marks may be special tokens."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from answer_streams import apart
from call_corpus import CORPUS, GO, LOOK, OTHERS, TOOLS, Case
from mdi.spec.options import TOOL_PARSERS
from mdi.text.answers import harmony
from mdi.text.answers.calls import typed_arguments
from mdi.text.answers.events import Call, CallBegun, CallPiece, End, Event
from mdi.text.answers.forms import PARSERS, SPOKEN, Form, form_of
from mdi.text.answers.gemma import gemma_calls
from mdi.text.answers.stream import AnswerStream
from mdi.text.limited import grammar_error
from mdi.text.texts import TextCodec

CASES = [(form, number) for form, (_, cases) in CORPUS.items() for number in range(len(cases))]
NO_CALLS = [(form, text) for form, texts in OTHERS.items() for text in texts]
# Without special tokens a text has no channels.
SPELT = [(form, number) for form, number in CASES if form != "harmony"]
WHOLE = (
    "mistral_list",
    "qwen3_coder",
    "glm",
    "minimax_m2",
    "gemma4",
)  # lists, marks around each argument, or values of their own
MARKS = [*sorted(SPOKEN), *harmony.MARKS]


@functools.cache
def tokenizer_of(has_marks: bool) -> Tokenizer:
    """With a token for each byte, and with marks that are special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|eos|>", special=True)])
    if has_marks:
        made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return made


@functools.cache
def codec(has_marks: bool) -> TextCodec:
    made = tokenizer_of(has_marks)

    class Read:
        backend, bos_id, eos_id, use_bos, processor = "huggingface", None, made.token_to_id("<|eos|>"), False, made

    return TextCodec(Read())


def ids_of(text: str, has_marks: bool) -> list[int]:
    return list(tokenizer_of(has_marks).encode(text, add_special_tokens=False).ids)


def form_named(name: str, has_marks: bool = True) -> Form:
    return form_of(CORPUS[name][0], harmony.MARKS if has_marks else ())


def told(events: Sequence[Event]) -> tuple[Any, ...]:
    words, reasoning, calls = apart(events)
    return words, reasoning, [(one.name, json.loads(one.arguments), *filter(None, [one.id])) for one in calls]


def of_pieces(form: Form, pieces: Sequence[str], is_cut: bool = False) -> tuple[Any, ...]:
    """Of an answer that comes as these texts."""
    return told(events_of(form, pieces, is_cut))


def events_of(form: Form, pieces: Sequence[str], is_cut: bool = False, streams_calls: bool = False) -> list[Event]:
    parsers = form.parsers(TOOLS, False, False, streams_calls)

    def through(events: Sequence[Event], first: int) -> list[Event]:
        for parser in parsers[first:]:
            events = [
                new for one in events for new in (parser.feed(one.text) if type(one).__name__ == "Text" else [one])
            ]
        return list(events)

    found = [new for piece in pieces for new in through(parsers[0].feed(piece), 1)]
    for number, parser in enumerate(parsers):
        found += through(parser.close(is_cut), number + 1)
    return found


def of_ids(form: Form, ids: Sequence[int], size: int, has_marks: bool, is_cut: bool = False) -> tuple[Any, ...]:
    stream = AnswerStream(codec(has_marks), form, (), TOOLS)
    events = [event for at in range(0, len(ids), size) for event in stream.feed(ids[at : at + size])]
    return told([*events, *stream.close(is_cut)])


def expected(case: Case) -> tuple[Any, ...]:
    return case.words, case.reasoning, [tuple(call) for call in case.calls]


@pytest.mark.parametrize(("form", "number"), SPELT)
def test_a_call_is_found_wherever_its_text_is_cut(form: str, number: int) -> None:
    case = CORPUS[form][1][number]
    for at in range(len(case.text) + 1):
        assert of_pieces(form_named(form), [case.text[:at], case.text[at:]]) == expected(case), at
    assert of_pieces(form_named(form), list(case.text)) == expected(case)


@pytest.mark.parametrize(("form", "number"), SPELT)
def test_a_call_is_found_byte_by_byte(form: str, number: int) -> None:
    case = CORPUS[form][1][number]
    ids = ids_of(case.text, False)
    assert len(ids) == len(case.text.encode())
    for size in (1, 2, 7):
        assert of_ids(form_named(form, False), ids, size, False) == expected(case), size


@pytest.mark.parametrize(("form", "number"), SPELT)
def test_arguments_come_in_pieces_wherever_their_text_is_cut(form: str, number: int) -> None:
    case = CORPUS[form][1][number]
    for pieces in ([case.text], list(case.text), *([case.text[:at], case.text[at:]] for at in range(len(case.text)))):
        events = events_of(form_named(form), pieces, streams_calls=True)
        assert told(events) == expected(case)
        check_pieces(events)
    n_pieces = sum(isinstance(one, CallPiece) for one in events_of(form_named(form), list(case.text), False, True))
    assert n_pieces > 10 * len(case.calls) or form in WHOLE


def check_pieces(events: Sequence[Event]) -> None:
    """Each call that has begun is the next one, and has the arguments that came in pieces."""
    begun, pieces = None, ""
    for event in events:
        if begun is None:
            assert not isinstance(event, CallPiece)
            begun, pieces = (event, "") if isinstance(event, CallBegun) else (None, "")
        elif isinstance(event, CallPiece):
            pieces += event.text
        else:
            assert event == Call(begun.name, pieces, begun.id)
            begun = None
    assert begun is None


def test_channels_have_arguments_in_pieces() -> None:
    for case in CORPUS["harmony"][1]:
        ids = ids_of(case.text, True)
        for size in (1, 2, len(ids)):
            stream = AnswerStream(codec(True), form_named("harmony"), (), TOOLS, streams_calls=True)
            events = [event for at in range(0, len(ids), size) for event in stream.feed(ids[at : at + size])]
            events = [one for one in [*events, *stream.close(False)] if not isinstance(one, End)]
            assert told(events) == expected(case)
            check_pieces(events)
            assert any(isinstance(one, CallPiece) for one in events) == bool(case.calls)


@pytest.mark.parametrize("text", ['{"a": "b"', '{"a": [1}', '{"a": }', '{"a": "</tool_call> and more'])
def test_a_call_that_has_begun_ends_as_one_whatever_its_arguments_are(text: str) -> None:
    """Clients have its pieces already. A call that has not begun is text, as ever."""
    said = f'<tool_call>\n{{"name": "look", "arguments": {text}'
    for is_cut in (False, True):
        events = events_of(form_named("hermes"), list(said), is_cut, streams_calls=True)
        assert apart(events)[2] == [Call("look", text)]
        check_pieces(events)
    other = said.replace("look", "nobody")
    assert apart(events_of(form_named("hermes"), list(other), streams_calls=True)) == [other, "", []]


@pytest.mark.parametrize(("form", "number"), CASES)
def test_marks_may_be_special_tokens(form: str, number: int) -> None:
    case = CORPUS[form][1][number]
    ids = ids_of(case.text, True)
    assert form in ("llama3",) or max(ids) > 256, "a mark is one token"
    for size in (1, 2, 3, len(ids)):
        assert of_ids(form_named(form), ids, size, True) == expected(case), size


@pytest.mark.parametrize(("form", "number"), CASES)
def test_an_answer_that_is_cut_off_has_the_calls_that_are_whole(form: str, number: int) -> None:
    case = CORPUS[form][1][number]
    ids, n_last = ids_of(case.text, True), 0
    for n in [*range(0, len(ids), 1 if len(ids) < 150 else 3), len(ids)]:
        words, _, calls = of_ids(form_named(form), ids[:n], 5, True, is_cut=True)
        assert calls == expected(case)[2][: len(calls)] and n_last <= len(calls), n
        begun = next((end for end in range(len(words), -1, -1) if case.words.startswith(words[:end].rstrip())), 0)
        assert len(words) - begun < 20, f"a part of a mark at most: {words}"
        n_last = len(calls)
    assert n_last == len(case.calls)


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_cannot_be_read_stays_text(form: str, text: str) -> None:
    for at in range(0, len(text) + 1, 1 if len(text) < 200 else 11):
        assert of_pieces(form_named(form), [text[:at], text[at:]]) == (text, "", []), at
    for has_marks in (False, True):
        assert of_ids(form_named(form, has_marks), ids_of(text, has_marks), 2, has_marks) == (text, "", [])


@pytest.mark.parametrize(("form", "number"), SPELT)
def test_calls_of_other_tools_stay_text(form: str, number: int) -> None:
    case = CORPUS[form][1][number]
    text = case.text.replace("look", "peek").replace("go.to", "goto")
    words, reasoning, calls = of_pieces(form_named(form), [text[:9], text[9:]])
    assert calls == [] and words.strip() in text and len(words.strip()) + len(reasoning) + 30 > len(text.strip())


@pytest.mark.parametrize(("form", "number"), SPELT)
def test_a_form_does_not_hold_the_text_before_a_call_back(form: str, number: int) -> None:
    parsers = form_named(form).parsers(TOOLS, False, False)
    events: list[Event] = parsers[0].feed("I look at it")
    for parser in parsers[1:]:
        events = [new for one in events for new in parser.feed(one.text)]  # type: ignore[union-attr]
    assert told(events)[0] == "I look at it"


def test_options_name_the_forms_and_each_is_in_the_corpus() -> None:
    assert sorted(PARSERS) == list(TOOL_PARSERS)
    assert set(CORPUS) == {*PARSERS, "deepseek's blocks"}
    for name, form in PARSERS.items():
        assert form_named(name).calls is form.calls, name
        found = form_of("{{ messages }}", harmony.MARKS, name)
        assert found.calls is form.calls and bool(found.special) == bool(form.special)
    assert form_of(CORPUS["harmony"][0], harmony.MARKS, "hermes").first is None
    assert form_of("<think><tool_call>", (), "glm").thinks, "reasoning is as the template says"
    assert form_of(None, (), "glm").is_plain


@pytest.mark.parametrize("form", ["mistral", "mistral_list"])
def test_ids_of_other_services_become_such_as_mistrals_templates_take(form: str) -> None:
    def chat(*ids: Any) -> list[dict[str, Any]]:
        calls = [{"type": "function", "function": {"name": "look", "arguments": "{}"}, "id": one} for one in ids]
        results = [{"role": "tool", "content": "a", "tool_call_id": one} for one in ids]
        return [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": calls}, *results]

    messages = form_named(form).messages
    assert messages(chat("aB3dE6gH9")) == chat("aB3dE6gH9"), "ids of ours and of the model go back unchanged"
    _, said, *results = messages(chat("call_1", "toolu_0123456789", "123456-89", ""))
    made = [call["id"] for call in said["tool_calls"]]
    assert made == [one["tool_call_id"] for one in results] and len({*made}) == 4
    assert all(len(one) == 9 and one.isalnum() for one in made)
    assert messages(chat("call_1"))[2]["tool_call_id"] == made[0], "the same, or no prefix would be kept"
    without = [{"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}, {"role": "tool", "content": "a"}]
    assert len(messages(without)[0]["tool_calls"][0]["id"]) == 9 and messages(without)[1] == without[1]


def test_a_model_that_goes_on_with_the_result_of_its_call_is_ended() -> None:
    made = Tokenizer(models.BPE({"a": 0}, []))
    made.add_special_tokens([AddedToken(one, special=True) for one in ("<|tool_call>", "<|tool_response>", "<eos>")])

    class Read:
        backend, bos_id, eos_id, use_bos, processor = "huggingface", None, made.token_to_id("<eos>"), False, made

    assert TextCodec(Read()).eos_ids == {made.token_to_id("<eos>"), made.token_to_id("<|tool_response>")}


FIXED = {
    "type": "object", "required": ["unit"], "additionalProperties": False,
    "properties": {
        "unit": {"type": "string", "enum": ["°C", "</x>"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
}  # fmt: skip
MADE = [*PARSERS, "deepseek's blocks"]


@functools.cache
def guide(has_marks: bool) -> Any:
    written = tokenizer_of(has_marks).to_str()
    return llguidance.LLTokenizer(written, eos_token=tokenizer_of(has_marks).token_to_id("<|eos|>"))


def matcher_of(form: Form, functions: list[tuple[str, Any]], has_marks: bool) -> Any:
    lark = form.demanded(functions, codec(has_marks).special_ids)
    assert lark is not None and grammar_error(lark, False) == ""
    return llguidance.LLMatcher(guide(has_marks), llguidance.LLMatcher.grammar_from_lark(lark))


def allowed(matcher: Any) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits) if i != 256]


def drawn(matcher: Any, seed: int) -> list[int]:
    """Ids that a model draws which knows nothing but the grammar."""
    rng, ids = random.Random(seed), list[int]()
    while not matcher.is_accepting():
        ids.append(rng.choice(allowed(matcher)))
        assert len(ids) < 600 and matcher.consume_token(ids[-1])
    return ids


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_a_call_that_is_demanded_is_one_whatever_the_model_draws(name: str, has_marks: bool) -> None:
    if name == "harmony" and not has_marks:
        return
    form = form_named(name, has_marks)
    functions = [("look", FIXED), ("go.to", {"type": "object", "properties": {}, "additionalProperties": False})]
    tools = [{"function": {"name": name, "parameters": schema}} for name, schema in functions]
    seen = set()
    for seed in range(30):
        ids = drawn(matcher_of(form, functions, has_marks), seed)
        stream = AnswerStream(codec(has_marks), form, (), tools, is_call=True)
        words, reasoning, [call] = apart([*stream.feed(ids), *stream.close(False)])
        given = json.loads(call.arguments)
        assert (words, reasoning) == ("", "") and call.name in ("look", "go.to")
        assert given.get("unit") in (("°C", "</x>") if call.name == "look" else (None,)) and given.get("days", 0) <= 9
        seen.add((call.name, "days" in given))
    assert len(seen) == 3, "both tools, and one that is not required"


@pytest.mark.parametrize("name", MADE)
def test_a_demanded_call_begins_with_the_first_byte_of_its_mark(name: str) -> None:
    matcher = matcher_of(form_named(name), [("look", LOOK)], True)
    first = tokenizer_of(True).decode(allowed(matcher)[:1], skip_special_tokens=False)
    assert len(allowed(matcher)) == 1
    assert name == "llama3" and first == "{" or first in MARKS


@pytest.mark.parametrize("name", [name for name in CORPUS if name != "harmony"])
def test_the_grammar_of_a_form_takes_what_models_of_that_form_write(name: str) -> None:
    """The first of each form; of others, models may write other blanks than the grammar."""
    matcher, ids = (
        matcher_of(form_named(name), [("look", LOOK), ("go.to", GO)], True),
        ids_of(CORPUS[name][1][0].text, True),
    )
    assert matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def test_a_schema_that_does_not_say_which_arguments_there_are_is_json() -> None:
    schema = {"anyOf": [LOOK, GO]}
    for name in PARSERS:
        has_marks = form_named(name).calls.written is not None and form_named(name).calls.written.key != ""
        assert (form_named(name).demanded([("look", schema)], {}) is None) == has_marks, name
    assert form_of("{{ messages }}", ()).demanded([("look", LOOK)], {}) is None


def test_definitions_are_not_copied_into_thousands_of_properties() -> None:
    definitions = {"one": {"type": "string", "description": "x" * 10_000}}

    def written(n: int) -> list[str | None]:
        schema = {"type": "object", "properties": {f"a{i}": {"$ref": "#/$defs/one"} for i in range(n)}}
        forms = [form for form in map(form_named, PARSERS) if form.calls.written is not None and form.calls.written.key]
        return [form.demanded([("look", {**schema, "$defs": definitions})], {}) for form in forms]

    assert None not in written(50) and len(written(50)) > 1
    assert set(written(200)) == {None}, "the answer is JSON then"


def test_numbers_that_are_no_json_are_no_values() -> None:
    assert typed_arguments([("a", "NaN"), ("b", "1")], {}) == {"a": "NaN", "b": 1}
    assert gemma_calls("<|tool_call>call:look{a:NaN}<tool_call|>", {"look": {}}) == []
    assert gemma_calls("<|tool_call>call:look{a:1}<tool_call|>", {"look": {}}) != []
