"""Writes folders with a `tiktoken.model` of small vocabularies that are made here, and what tiktoken makes of texts with them.

`make references` runs this in its environment, as it does write_tokens.py:

    .venv-references/bin/python tests/references/write_ranks.py FOLDER

For each case, FOLDER gets a directory with `tiktoken.model` and `tokenizer_config.json`, as Kimi's models have them, and
`texts.json`: texts with their ids.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

from write_tokens import LEARNED, LETTERS, learned

# As it is in the Python file beside Kimi's tokenizer.
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)  # fmt: skip
N_RANDOM, N_SPECIAL = 200, 256
MIXED = "中文English混合 你好世界 世界HelloWorld 中A文b字 漢字カナ漢字かな 한국어漢字 ÀÉ中naïve文 "
MIXED += "123中456文 don't中 WE'LL文 中\u0301文 "
# Behind the ranks, as in Kimi's tokenizer_config.json: id there, name, and whether it is special.
NAMED = {
    0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|im_end|>", True), 3: ("<|im_user|>", True), 4: ("<|im_assistant|>", True),
    10: ("<|im_system|>", True), 11: ("<|tool_calls_section_begin|>", False), 17: ("<|im_middle|>", True), 254: ("[UNK]", True),
}  # fmt: skip
MARKED = (
    "<|im_user|>user<|im_middle|>你好 Kimi<|im_end|><|tool_calls_section_begin|><|no mark|> <|reserved_token_{}|>[EOS]"
)
CASES = ("learned", "shuffled", "longer")


def version() -> str:
    here = Path(__file__)
    return hashlib.sha256(here.read_bytes() + (here.parent / "write_tokens.py").read_bytes()).hexdigest()


def ranks_of(case: str, texts: list[str]) -> dict[bytes, int]:
    """Byte strings and their ranks: as they are learned; the same in any order; and with some that no merges lead to."""
    found, choice = learned("(?V1)" + PATTERN, "".join(texts)), random.Random(case)
    tokens = list(found)
    if case == "shuffled":
        choice.shuffle(tokens)
    if case == "longer":
        words = [word.encode() for text in texts for word in text.split()]
        tokens += list(dict.fromkeys(word for word in choice.sample(words, 200) if word and word not in found))
    return {token: rank for rank, token in enumerate(tokens)}


def made(case: str, folder: Path) -> int:
    import tiktoken

    choice, pieces = random.Random(1), [*LEARNED.split(), *LETTERS, *MIXED.split(), *MIXED]
    texts = [LEARNED, MIXED, "", " ", *("".join(choice.choices(pieces, k=15)) for _ in range(N_RANDOM))]
    ranks = ranks_of(case, texts)
    n = len(ranks)
    names = {n + i: NAMED[i][0] if i in NAMED else f"<|reserved_token_{n + i}|>" for i in range(N_SPECIAL)}
    encoding = tiktoken.Encoding(
        case, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={name: i for i, name in names.items()}
    )
    texts.append(MARKED.format(n + 100))
    settings = {
        "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {str(n + i): {"content": name, "special": flag} for i, (name, flag) in NAMED.items()},
    }  # fmt: skip
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    told: list[dict[str, Any]] = [{"text": text, "ids": encoding.encode(text, allowed_special="all")} for text in texts]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "texts.json").write_text(json.dumps(told), encoding="utf-8")
    return sum(len(one["ids"]) for one in told)


def main() -> None:
    folder = Path(sys.argv[1])
    for case in CASES:
        print(f"{case}: {made(case, folder / case)} ids")
    (folder / "version.txt").write_text(version(), encoding="utf-8")


if __name__ == "__main__":
    main()
