"""Writes what transformers' beam search finds with some of the models of write_models.py.

`make references` runs this behind it:

    .venv-references/bin/python tests/references/write_beams.py FOLDER

FOLDER gets `beams.json`: of each family, cases with their settings, and the best texts with their scores. `version` is the
hash of this file and of the models.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "mistral", "qwen3", "gemma3", "gpt_neox")  # mistral and gemma3 with windows
KINDS: tuple[bool | str, ...] = (True, False, "never")
N_BEAMS, N_TOKENS = 4, 14
PENALTIES = (0.0, 1.0, 2.5)
REPETITION = 1.3


def version(folder: Path) -> str:
    return hashlib.sha256(Path(__file__).read_bytes() + (folder / "version.txt").read_bytes()).hexdigest()


def texts(model: Any, prompt: list[int], settings: dict[str, Any]) -> tuple[list[list[int]], list[float]]:
    """The best texts without their EOS, and the score of each."""
    import torch

    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=N_BEAMS, num_return_sequences=N_BEAMS, do_sample=False,
        max_new_tokens=N_TOKENS, pad_token_id=0, return_dict_in_generate=True, output_scores=True, **settings,
    )  # fmt: skip
    eos = settings.get("eos_token_id") or []
    rows = [row[len(prompt) :].tolist() for row in found.sequences]
    ends = [next((i for i, token in enumerate(row) if token in eos), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)], found.sequences_scores.tolist()


def cases(model: Any, prompt: list[int]) -> list[dict[str, Any]]:
    """Without an EOS, and with several: tokens of the best text, or the second and third best behind its tokens, so that a text
    may end at each of them, although another one that goes on is better.
    """
    import torch

    (best, *_), _ = texts(model, prompt, {})
    with torch.no_grad():
        rows = model(torch.tensor([[*prompt, *best[:-1]]])).logits[0, len(prompt) - 1 :]
    others = rows.topk(3).indices[:, 1:].tolist()
    late = [best[6], others[3][0], others[8][0]]
    early = [token for row in others[1:7] for token in row]
    late, early = (sorted(set(one)) for one in (late, early))
    found = [{"length_penalty": 1.0, "early_stopping": False}]
    found += [
        {"length_penalty": penalty, "early_stopping": kind, "eos_token_id": eos}
        for eos in (late, early) for penalty in PENALTIES for kind in KINDS
    ]  # fmt: skip
    found.append({**found[-1], "repetition_penalty": REPETITION})
    answers = []
    for settings in found:
        ids, scores = texts(model, prompt, settings)
        answers.append({"settings": settings, "ids": ids, "scores": scores})
    return answers


def main() -> None:
    from transformers import AutoModelForCausalLM

    folder = Path(sys.argv[1])
    answers: dict[str, Any] = {}
    for name in FAMILIES:
        model = AutoModelForCausalLM.from_pretrained(folder / name).float().eval()
        prompt = json.loads((folder / name / "reference.json").read_text(encoding="utf-8"))["prompt"]
        answers[name] = cases(model, prompt)
        kinds = {json.dumps(case["ids"]) for case in answers[name]}
        print(f"{name}: {len(answers[name])} cases, {len(kinds)} different answers", flush=True)
    data = {"version": version(folder), "families": answers}
    (folder / "beams.json").write_text(json.dumps(data), encoding="utf-8")


if __name__ == "__main__":
    main()
