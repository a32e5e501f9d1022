"""Writes what tiktoken makes of texts, with the patterns of OpenAI's encodings and a small vocabulary that is made here.

`make references` runs this in its environment, as it does write_models.py:

    .venv-references/bin/python tests/references/write_tokens.py FOLDER

FOLDER gets `tokens.json`: for each encoding, its tokens in the order of their ids (each as the numbers of its bytes, a special
one as its word), and texts with their ids. `version` is the hash of this file.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

# encoding -> special tokens of it
ENCODINGS = {
    "cl100k_base": ("<|endoftext|>",),
    "o200k_harmony": (
        "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>",
    ),
}  # fmt: skip
N_MERGES, N_RANDOM = 900, 100
LEARNED = (
    "HelloWorld's rings don't DON'T we'll WE'LL 1234567 and 89, Grüße aus Zürich — 世界 🙂🙂 https://a.b/c//d\n\n\tif (x) {\n"
    "        return x;  }\r\n  ÀÉ ÀÉs naïve naïve cafe\u0301 नमस्ते привет ПриВет мир ..//\n/ ##--\t\t end   "
)
MARKED = "<|start|>assistant<|channel|>final<|message|>Yes: <|no mark|> 3<|return|>"
LETTERS = "aZß É世́न🙂'sSTt09/.,-_ \t\n\r\u00a0\u2028"


def version() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def learned(pattern: str, text: str) -> dict[bytes, int]:
    """The bytes, and the pairs that are most frequent in a text, one after the other."""
    import regex

    ranks = {bytes([i]): i for i in range(256)}
    words = [[bytes([byte]) for byte in word.encode()] for word in regex.findall(pattern, text)]
    while len(ranks) < 256 + N_MERGES:
        counts: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in zip(word, word[1:], strict=False):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        left, right = max(counts, key=lambda pair: (counts[pair], pair))
        ranks.setdefault(left + right, len(ranks))
        for word in words:
            at = 0
            while at < len(word) - 1:
                if word[at : at + 2] == [left, right]:
                    word[at : at + 2] = [left + right]
                at += 1
    return ranks


def made(name: str) -> dict[str, Any]:
    import tiktoken
    from tiktoken_ext import openai_public

    openai_public.load_tiktoken_bpe = lambda *_, **__: {}  # the vocabulary is on the network
    settings = openai_public.ENCODING_CONSTRUCTORS[name]()
    choice, pieces = random.Random(1), [*LEARNED.split(), *LETTERS]
    texts = [LEARNED, "", " ", "  ", *("".join(choice.choices(pieces, k=15)) for _ in range(N_RANDOM))]
    ranks = learned(settings["pat_str"], "".join(texts))
    specials = ENCODINGS[name]
    assert set(specials) <= set(settings["special_tokens"])
    encoding = tiktoken.Encoding(
        name, pat_str=settings["pat_str"], mergeable_ranks=ranks,
        special_tokens={word: len(ranks) + i for i, word in enumerate(specials)},
    )  # fmt: skip
    return {
        "tokens": [*map(list, ranks), *specials],
        "texts": [{"text": text, "ids": encoding.encode(text, allowed_special="all")} for text in (*texts, MARKED)],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    found = {"version": version(), "encodings": {name: made(name) for name in ENCODINGS}}
    (folder / "tokens.json").write_text(json.dumps(found), encoding="utf-8")
    for name, of_name in found["encodings"].items():
        print(f"{name}: {len(of_name['tokens'])} tokens, {sum(len(one['ids']) for one in of_name['texts'])} ids")


if __name__ == "__main__":
    main()
