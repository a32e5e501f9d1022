"""A text to train a small model on within minutes: lines of a seeded grammar.

It has 65 characters, as many as Tiny Shakespeare, so that a NanoGPT of it has the thesis' number of parameters to the
digit; and what it leaves to chance is known, so that a loss can be judged.
"""

from __future__ import annotations

import math
import random
from string import Formatter

_WORDS = {
    "name": "Anna|Ben|Clara|David|Emma|Felix|Greta|Hugo|Ida|Jonas|Klara|Leo|Mia|Noah|Olga|Paul|Quinn|Rosa|Sam|Tina|Ugo|Vera|"
    "Willy|Xenia|Yara|Zoe",
    "verb": "finds|paints|sells|hides|mends|carries|wants|breaks",
    "kind": "old|young|tall|quiet|brave|lazy|gentle|proud",
    "thing": "apple|book|candle|drum|flute|garden|hammer|jug|kite|lamp|mirror|quilt|rope|violin|box",
    "place": "in the house|near the river|on the hill|at the market|behind the church|under the bridge",
}
WORDS = {kind: words.split("|") for kind, words in _WORDS.items()}
LINES = (
    "{name} {verb} the {kind} {thing} {place}.\n",
    "The {kind} {thing} is {place}, and {name} {verb} it.\n",
    '"Who {verb} my {thing}?" asks {name}; "I do!" says {name}.\n',
    "{name}'s {thing}: {kind}, {kind} (and {place}).\n",
    "Well-known {name} {verb} no {thing} {place}!\n",
)
N_LINES = 20_000  # a million characters


def grammar_text(n_lines: int = N_LINES, seed: int = 1) -> str:
    """So many lines; the same on every machine."""
    chance = random.Random(seed)
    return "".join(_line(chance) for _ in range(n_lines))


def _line(chance: random.Random) -> str:
    parts = []
    for literal, kind, _, _ in Formatter().parse(chance.choice(LINES)):
        parts.append(literal)
        if kind is not None:
            parts.append(chance.choice(WORDS[kind]))
    return "".join(parts)


def entropy() -> float:
    """What each character leaves to chance on average, in nats: no model of whole lines can have a smaller loss."""
    nats, n_characters = math.log(len(LINES)), 0.0
    for line in LINES:
        for literal, kind, _, _ in Formatter().parse(line):
            n_characters += len(literal) / len(LINES)
            if kind is not None:
                nats += math.log(len(WORDS[kind])) / len(LINES)
                n_characters += sum(map(len, WORDS[kind])) / len(WORDS[kind]) / len(LINES)
    return nats / n_characters
