"""Texts with a gap: written with the marks that a tokenizer has, and continued by the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from own_server import SEEDS, run, server
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from families import greedy
from mdi.node.secondary import SecondaryNode
from mdi.serve.completions import COMPLETIONS
from mdi.text.infill import MARKS, with_gap
from mdi.text.tokenizer import FileTokenizer
from tiny_checkpoint import END, encode, tiny_gpt, tokenizer, write_checkpoint

FACTS = {"backend": "huggingface", "bos_id": None, "eos_id": None, "use_bos": False}
BEFORE, BEHIND = "def f(x):\n    return ", " + 1\n"
# As published, for some models that have them.
WRITTEN = [
    "<|fim_prefix|>{}<|fim_suffix|>{}<|fim_middle|>", "<fim_prefix>{}<fim_suffix>{}<fim_middle>",
    "<fim-prefix>{}<fim-suffix>{}<fim-middle>", "▁<PRE>{}▁<SUF>{}▁<MID>", "<｜fim▁begin｜>{}<｜fim▁hole｜>{}<｜fim▁end｜>",
]  # fmt: skip


def with_tokens(folder: Path, *tokens: str) -> FileTokenizer:
    folder.mkdir(exist_ok=True)
    made = Tokenizer.from_str(tokenizer().to_str())
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    made.save(str(folder / "tokenizer.json"))
    return FileTokenizer(folder, FACTS)


@pytest.mark.parametrize(("marks", "written"), [*zip(MARKS, WRITTEN, strict=True)])
def test_each_form_as_published(marks: Any, written: str, tmp_path: Path) -> None:
    of = with_tokens(tmp_path, *marks[:3], *marks.ends[:1])
    gap = with_gap(of, BEFORE, BEHIND, None)
    assert gap is not None and gap.ids == of.ids_of(written.format(BEFORE, BEHIND), adds_special=False)
    assert gap.ends == [of.token_to_id(token) for token in (*marks[:3], *marks.ends[:1])]
    with_first = with_gap(of, encode(BEFORE), BEHIND, 7)
    assert with_first is not None and with_first.ids == [7, *gap.ids]


def test_without_all_three_marks_there_is_no_such_text(tmp_path: Path) -> None:
    assert with_gap(with_tokens(tmp_path, *MARKS[0][:2]), BEFORE, BEHIND, None) is None


def test_behind_a_gap_no_word_mark_is_added(tmp_path: Path) -> None:
    """By tokenizers that put one before each text; what precedes the gap gets it, as a text does."""
    names = ["<unk>", "▁", "a", "b", "▁a", "▁b", "▁<PRE>", "▁<SUF>", "▁<MID>", "☺"]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Replace("▁", " ")
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[6:9]])
    made.save(str(tmp_path / "tokenizer.json"))
    gap = with_gap(FileTokenizer(tmp_path, FACTS), "ab", "ba", 0)
    assert gap is not None and gap.ids == [0, 6, 4, 3, 7, 3, 2, 8]
    gap = with_gap(FileTokenizer(tmp_path, FACTS), "ab", " ba", 0)
    assert gap is not None and gap.ids == [0, 6, 4, 3, 7, 5, 2, 8]


def test_a_model_fills_the_gap_and_one_without_marks_refuses(tmp_path: Path, nodes: list[SecondaryNode]) -> None:
    marks, ids = MARKS[0], {}
    for name, seed in SEEDS.items():
        write_checkpoint(tmp_path / name, seed)
    # in the places of its last tokens, which the model knows
    path = tmp_path / "one" / "tokenizer.json"
    found = json.loads(path.read_text())
    last = sorted(found["model"]["vocab"], key=found["model"]["vocab"].get)[-4:]
    found["model"]["merges"] = [pair for pair in found["model"]["merges"] if not any("".join(pair) in t for t in last)]
    for token, own in zip((*marks[:3], marks.ends[0]), last, strict=True):
        ids[token] = found["model"]["vocab"].pop(own)
        found["added_tokens"].append({**found["added_tokens"][0], "id": ids[token], "content": token})
    path.write_text(json.dumps(found))
    of = Tokenizer.from_file(str(path))
    prompt = [
        *(ids[marks.before], *of.encode(BEFORE).ids),
        *(ids[marks.behind], *of.encode(BEHIND).ids),
        ids[marks.gap],
    ]
    written = greedy(tiny_gpt(SEEDS["one"]), prompt, 12)
    stops = [i for i, one in enumerate(written) if one in (*ids.values(), of.token_to_id(END))]
    written = written[: min(stops, default=12)]

    async def scenario() -> None:
        async with server(tmp_path, nodes) as made:
            asked = {"model": "one", "prompt": BEFORE, "suffix": BEHIND, "max_tokens": 12, "temperature": 0}
            status, told = await made.ask(COMPLETIONS, asked)
            assert status == 200 and told["choices"][0]["text"] == of.decode(written), told
            assert told["usage"]["prompt_tokens"] == len(prompt)
            assert (await made.ask(COMPLETIONS, {**asked, "prompt": of.encode(BEFORE).ids}))[1]["choices"] == told[
                "choices"
            ]
            for mark in ids.values():  # what else a mark would say, a text with a gap ends there
                biased = {**asked, "logit_bias": {str(mark): 100}}
                (choice,) = (await made.ask(COMPLETIONS, biased))[1]["choices"]
                assert (choice["text"], choice["finish_reason"]) == ("", "stop")
            (choice,) = (await made.ask(COMPLETIONS, {**biased, "suffix": ""}))[1]["choices"]
            assert choice["finish_reason"] == "length", "in other texts it is a token"
            status, told = await made.ask(COMPLETIONS, {**asked, "model": "two"})
            assert (status, told["error"]["param"]) == (400, "suffix") and "no marks" in told["error"]["message"]
            status, told = await made.ask(COMPLETIONS, {**asked, "suffix": "x" * 9000})
            assert (status, told["error"]["code"]) == (400, "context_length_exceeded")

    run(scenario())


@pytest.mark.parametrize("marks", MARKS)
def test_marks_in_a_users_file_are_words(marks: Any, tmp_path: Path) -> None:
    """A file that has them, as one about such texts, keeps its gap where it is, and no letter is lost."""
    of = with_tokens(tmp_path, *marks[:3], *marks.ends[:1])
    said = f"a = '{marks.gap}' {marks.behind}{marks.behind} {''.join(marks.ends[:1])} {END}"
    gap = with_gap(of, f"{BEFORE}{said}", f"{said}{BEHIND}", None, [END])
    assert gap is not None
    for mark in (*marks[:3], *marks.ends[:1], END):
        assert gap.ids.count(of.token_to_id(mark)) == (mark in marks[:3])
    text = of.processor.decode(gap.ids, skip_special_tokens=False)
    assert text == f"{marks.before}{BEFORE}{said}{marks.behind}{said}{BEHIND}{marks.gap}"
