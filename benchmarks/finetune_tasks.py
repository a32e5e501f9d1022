"""What fine-tuning is measured with: texts that this project makes."""

from __future__ import annotations

import random

Rows = list[dict[str, str]]


def _words(listed: str) -> list[str]:
    return listed.split(", ")


PRAISE = _words("noble, gentle, sweet, gracious, honest, virtuous, worthy, fair, loving, happy, royal, blessed")
BLAME = _words("false, base, vile, foul, wicked, cruel, cursed, proud, bloody, villanous, envious, wretched")
NAMES = _words("KING RICHARD, GLOUCESTER, ROMEO, MENENIUS, PETRUCHIO, ISABELLA, WARWICK, NURSE, LEONTES, JULIET")
NOUNS = ["lord", "friend", "man", "prince", "brother", "lady", "father", "son", "heart", "tongue"]
FRAMES = [
    "Thou art a {a} {n}, and {b} is thy name.", "O {a}, {b} {n}! what hast thou done?", "I know thee well: a {a} and {b} {n}.",
    "He is {a}, my {n}, and his words are {b}.", "Was ever {n} so {a}, or in his deeds so {b}?",
    "Come, {a} {n}; speak, thou {b} one.",
]  # fmt: skip


def tone(n: int, seed: int, is_held_out: bool) -> Rows:
    """Does somebody praise or blame? What is held out has adjectives, names and a frame that are not learned from."""
    chance, found = random.Random(seed), []
    for i in range(n):
        label, words = (("praise", PRAISE), ("blame", BLAME))[i % 2]
        own = words[9:] if is_held_out else words[:9]
        a, b = chance.sample(own, 2)
        name = chance.choice(NAMES[7:] if is_held_out else NAMES[:7])
        frame = chance.choice(FRAMES[4:] if is_held_out else FRAMES[:4])
        found.append({"text": f"{name}:\n{frame.format(a=a, b=b, n=chance.choice(NOUNS))}", "label": label})
    return found


def reports(n: int, seed: int) -> Rows:
    """Lines that a ring of nodes might report: their words and their form are learned, what is in them is chance."""
    chance, found = random.Random(seed), []
    for _ in range(n):
        lines, node, frame = [], chance.randrange(4), chance.randrange(100, 900)
        for _ in range(6):
            rows, after = chance.choice([1, 4, 16, 64]), (node + 1) % 4
            lines.append(f"node {node} computed {rows} rows of frame {frame} and sent them to node {after}.")
            if chance.random() < 0.2:
                lines.append(f"node {after} is lost; its blocks are loaded by node {(after + 1) % 4}.")
            node, frame = after, frame + 1
        found.append({"text": "\n".join(lines)})
    return found
