#!/usr/bin/env python3
"""What rows lose on the wire, and what bringing them into its formats takes: the numbers that docs/log.md quotes.

    benchmarks/wire_formats.py --ckpt assets/nano-llama --text tiny-shakespeare.txt

- error: of one hop, relative, over the rows that a model's blocks hand on; and of the next layer's result where 0.2 % of the
  channels are many times larger and the next layer undoes that.
- perplexity and top-1 agreement with float32, on the last part of the text, with one hop in the middle and one behind every
  block.
- time of encoding and decoding frames of 1, 8 and 64 rows, medians, one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from litgpt.config import Config
from litgpt.model import GPT
from tokenizers import Tokenizer

from mdi.engine.rows import ENCODERS, Encoder

N_WINDOWS = 20
N_REPEATS = 15
N_CALLS = 20


def hop(encoder: Encoder, x: torch.Tensor) -> torch.Tensor:
    """(n_rows, n_cols) as the next node gets them."""
    return encoder.decode(encoder.encode(x), *x.shape)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@contextmanager
def hops_behind(gpt: GPT, blocks: Iterable[int], encoder: Encoder) -> Iterator[None]:
    """The model with a hop behind each of `blocks`."""
    handles = [
        gpt.transformer.h[i].register_forward_hook(lambda block, given, x: hop(encoder, x[0])[None]) for i in blocks
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def logits_of(gpt: GPT, windows: torch.Tensor) -> torch.Tensor:
    """(windows, length) ids -> logits of all positions but each window's last."""
    return torch.cat([gpt(window[None])[0, :-1] for window in windows])


@torch.inference_mode()
def rows_of(gpt: GPT, window: torch.Tensor) -> list[torch.Tensor]:
    """What each block hands on, (length, n_embd)."""
    found: list[torch.Tensor] = []
    handles = [block.register_forward_hook(lambda block, given, x: found.append(x[0])) for block in gpt.transformer.h]
    gpt(window[None])
    for handle in handles:
        handle.remove()
    return found


def quality(folder: Path, text: Path) -> None:
    config = Config.from_file(folder / "model_config.yaml")
    gpt = GPT(config).eval()
    state = torch.load(folder / "lit_model.pth", map_location="cpu", weights_only=True)
    gpt.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text.read_text(encoding="utf-8")).ids
    windows = torch.tensor(ids[-N_WINDOWS * config.block_size :]).view(N_WINDOWS, config.block_size)
    targets = windows[:, 1:].reshape(-1)
    plain = logits_of(gpt, windows)

    def perplexity(logits: torch.Tensor) -> float:
        return float(torch.nn.functional.cross_entropy(logits, targets).exp())

    print(f"{config.name}: {len(targets)} tokens, perplexity {perplexity(plain):.4f} in float32")
    rows = rows_of(gpt, windows[0])
    for name, encoder in ENCODERS.items():
        worst = max(error(hop(encoder, x), x) for x in rows)
        print(f"{name}: error of one hop at most {worst:.5f}")
        for where, blocks in (("one hop", [config.n_layer // 2 - 1]), ("every block", range(config.n_layer))):
            with hops_behind(gpt, blocks, encoder):
                logits = logits_of(gpt, windows)
            agreement = float((logits.argmax(1) == plain.argmax(1)).float().mean())
            change = perplexity(logits) / perplexity(plain) - 1
            print(f"{name}, {where}: perplexity {change:+.4%}, top-1 agreement {agreement:.3%}")


def large_channels(n_cols: int = 2048) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, n_cols, generator=generator)
    weight = torch.randn(512, n_cols, generator=generator)
    large = torch.randperm(n_cols, generator=generator)[: n_cols // 500]
    for ratio in (1, 30, 300, 3000):
        rows, undoing = x.clone(), weight.clone()
        rows[:, large] *= ratio
        undoing[:, large] /= ratio
        errors = (f"{name} {error(hop(e, rows) @ undoing.T, x @ weight.T):.4f}" for name, e in ENCODERS.items())
        print(f"0.2 % of the channels {ratio} times larger: {', '.join(errors)}")


def median_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(N_REPEATS):
        begin = time.perf_counter()
        for _ in range(N_CALLS):
            call()
        times.append((time.perf_counter() - begin) / N_CALLS)
    return statistics.median(times) * 1e6


def speed(n_cols: int = 2048) -> None:
    torch.ones(6_000_000)  # after freeing that much, malloc keeps what is freed, as it does in a node that computes
    for n_rows in (1, 8, 64):
        x = torch.randn(n_rows, n_cols)
        for name, encoder in ENCODERS.items():
            data = encoder.encode(x)
            to_wire = median_us(lambda encoder=encoder, x=x: encoder.encode(x))
            back = median_us(lambda encoder=encoder, data=data, n=n_rows: encoder.decode(data, n, n_cols))
            share = data.numel() / (4 * x.numel())
            print(f"{name}, {n_rows} x {n_cols}: {share:.1%} of the bytes, {to_wire:.0f} us there, {back:.0f} us back")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, default=Path("assets/nano-llama"))
    parser.add_argument("--text", type=Path, help="without it, only what needs no text is measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.text is not None:
        quality(args.ckpt, args.text)
    large_channels()
    speed()


if __name__ == "__main__":
    main()
