#!/usr/bin/env python3
"""Is the text of a small model trained on one corpus any good? The numbers that assets/nano-llama/README.md quotes.

    benchmarks/nano_llama_quality.py --ckpt assets/nano-llama --text tiny-shakespeare.txt

Samples are drawn with litgpt's own GPT, on one device, so that nothing of the ring is measured here.

- word share: words of the samples that are words of the corpus (letters and apostrophes, lower case; a last word that
  the limit may have cut is left out); also of the worst single sample.
- recitation: windows of eight words of the samples that stand in the corpus word for word; and the longest such run.
- form: lines that are empty, a speaker's name with a colon after an empty line, or text below such a name.
- losses: nats per token over the whole held-out tenth and an equally long start of the training part.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from litgpt.config import Config
from litgpt.model import GPT
from tokenizers import Tokenizer

WINDOW_WORDS = 8
WORD = re.compile(r"[A-Za-z]+(?:['’][A-Za-z]+)*")
SPEAKER = re.compile(r"[A-Z][A-Za-z' .,&-]*:")


def words_of(text: str) -> list[str]:
    return [word.lower() for word in WORD.findall(text)]


def load(folder: Path) -> tuple[GPT, Tokenizer]:
    """The model with float32 weights, and its tokenizer."""
    model = GPT(Config.from_file(folder / "model_config.yaml"))
    state = torch.load(folder / "lit_model.pth", map_location="cpu", weights_only=True)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.inference_mode()
def generate(model: GPT, prompts: list[list[int]], n_tokens: int, temperature: float, top_k: int, seed: int) -> list:
    """Continues prompts of the same length together; returns the new ids of each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor(prompts)
    n_prompt = ids.shape[1]
    model.max_seq_length = n_prompt + n_tokens
    model.set_kv_cache(batch_size=len(prompts))
    logits = model(ids, torch.arange(n_prompt))[:, -1]
    while True:
        best, where = torch.topk(logits / temperature, min(top_k, logits.shape[-1]))
        choice = torch.multinomial(torch.softmax(best, -1), 1, generator=generator)
        ids = torch.cat([ids, where.gather(1, choice)], dim=1)
        if ids.shape[1] == n_prompt + n_tokens:
            break
        logits = model(ids[:, -1:], torch.tensor([ids.shape[1] - 1]))[:, -1]
    model.clear_kv_cache()
    model.max_seq_length = model.config.block_size
    return ids[:, n_prompt:].tolist()


@torch.inference_mode()
def loss(model: GPT, ids: list[int]) -> float:
    """Nats per token, over windows of the model's whole context."""
    length = model.config.block_size
    total, count = 0.0, 0
    for start in range(0, len(ids) - length, length):
        window = torch.tensor(ids[start : start + length + 1])
        logits = model(window[None, :-1])[0]
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        count += length
    return total / count


def windows(words: list[str], size: int = WINDOW_WORDS) -> Iterator[tuple[str, ...]]:
    return zip(*(words[i:] for i in range(size)), strict=False)


def longest_run(words: list[str], corpus: str) -> int:
    """Words of the longest run that stands in `corpus`, its words joined and bounded by single spaces."""
    best = start = 0
    for stop in range(1, len(words) + 1):
        while start < stop and f" {' '.join(words[start:stop])} " not in corpus:
            start += 1
        best = max(best, stop - start)
    return best


def speakers_and_form(text: str) -> tuple[int, int, int]:
    """Number of speeches, of lines in the form of a play, and of lines.

    A speech is an empty line, a name with a colon alone on a line, and lines of text. In form are these, up to the next
    empty line; text under no name is not. What stands before the first empty line and after the last line end does not
    count: a sample may begin and end in the middle.
    """
    lines = text.split("\n")[:-1]
    first = lines.index("") if "" in lines else len(lines)
    n_speeches = n_good = 0
    spoken, previous = False, None
    for line in lines[first:]:
        if not line:
            spoken = False
        elif previous == "" and SPEAKER.fullmatch(line):
            spoken = True
            n_speeches += 1
        n_good += not line or spoken
        previous = line
    return n_speeches, n_good, len(lines) - first


def measure(samples: list[str], corpus_text: str) -> None:
    corpus = words_of(corpus_text)
    known, seen = set(corpus), set(windows(corpus))
    joined = f" {' '.join(corpus)} "
    per_sample = [words_of(text)[:-1] for text in samples]
    shares = [sum(word in known for word in words) / len(words) for words in per_sample]
    n_words = sum(map(len, per_sample))
    n_known = sum(word in known for words in per_sample for word in words)
    hits = [window in seen for words in per_sample for window in windows(words)]
    print(f"words of the corpus: {n_known / n_words:.1%} of {n_words} (worst sample {min(shares):.1%})")
    print(f"recited windows of {WINDOW_WORDS} words: {sum(hits) / len(hits):.1%} of {len(hits)}")
    print(f"longest run of words that stands in the corpus: {max(longest_run(words, joined) for words in per_sample)}")
    forms = [speakers_and_form(text) for text in samples]
    n_speeches, n_good, n_lines = (sum(column) for column in zip(*forms, strict=True))
    _, n_good_corpus, n_lines_corpus = speakers_and_form(corpus_text)
    print(f"lines in the form of a play: {n_good / max(1, n_lines):.1%} (corpus: {n_good_corpus / n_lines_corpus:.1%})")
    print(f"speeches per sample: {n_speeches / len(samples):.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, required=True, help="folder with lit_model.pth and tokenizer.json")
    parser.add_argument("--text", type=Path, required=True, help="the corpus that it was trained on")
    parser.add_argument("--n-samples", type=int, default=10)
    parser.add_argument("--n-tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int, default=200)
    parser.add_argument("--prompt", default="\n", help="what every sample continues (default: a line end)")
    parser.add_argument("--seed", type=int, default=10137)
    parser.add_argument("--show", type=int, default=3, metavar="N", help="samples to print (%(default)s)")
    args = parser.parse_args()

    model, tokenizer = load(args.ckpt)
    text = args.text.read_bytes().decode("utf-8")
    prompt = tokenizer.encode(args.prompt).ids
    drawn = generate(model, [prompt] * args.n_samples, args.n_tokens, args.temperature, args.top_k, args.seed)
    samples = [tokenizer.decode(ids) for ids in drawn]
    ids = tokenizer.encode(text).ids
    n_train = len(ids) * 9 // 10
    print(f"parameters: {sum(p.numel() for p in model.parameters()):,}")
    print(f"weights on disk: {(args.ckpt / 'lit_model.pth').stat().st_size:,} bytes")
    print(f"training loss: {loss(model, ids[: len(ids) - n_train]):.3f} nats per token (the text's first tenth)")
    held_out = loss(model, ids[n_train:])
    n_chars = len(tokenizer.decode(ids[n_train:]))
    print(
        f"held-out loss: {held_out:.3f} nats per token, {held_out * (len(ids) - n_train) / n_chars:.3f} per character"
    )
    measure(samples, text)
    for i, sample in enumerate(samples[: args.show]):
        print(f"\n--- sample {i} ---\n{sample}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
