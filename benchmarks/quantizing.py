#!/usr/bin/env python3
"""What q4_k and q6_k lose on a model whose numbers were never rounded, beside other formats and llama.cpp's Q4_K_M.

    benchmarks/quantizing.py                       trains a small model first: some minutes
    benchmarks/quantizing.py --ckpt DIR            keeps it there, and uses it when it is there
    benchmarks/quantizing.py --text FILE           trained on another text than Python's documentation

The model (rows of 256 and 512) is trained on the first eight tenths of the text, calibrated on the ninth, and measured on the
last. As in quality.py, channels are planted that are 30 times larger than others, which changes nothing in exact numbers.
Measured are weights alone: the unpacked numbers in float32. llama.cpp's file is made by `llama_model_quantize` from an exported
fp16 file, where the package llama-cpp-python (0.3.36 or newer) is installed; it is no dependency.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from litgpt.config import Config
from litgpt.model import GPT

import on_path
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.gguf_export import export_gguf
from mdi.checkpoint.ggufsource import GgufSource
from mdi.checkpoint.mixtures import meant
from mdi.checkpoint.packing import Packing, plain
from mdi.checkpoint.source import LitCheckpoint
from mdi.checkpoint.weights import WeightSource
from mdi.stages.calibration import mean_squares
from mdi.text.texts import TextCodec
from quality import planted
from records import add_json_flag, save

TOKENIZER = on_path.ROOT / "assets" / "nano-llama"
LENGTH, BATCH = 64, 12
N_TOKENS = 12_000  # that are measured, and as many for calibrating
Q4_K_M = 15  # of llama.cpp's kinds of files


def config() -> Config:
    return Config(
        name="small", block_size=LENGTH, vocab_size=2048, padded_vocab_size=2048, n_layer=4, n_head=8, n_embd=256,
        n_query_groups=4, rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", intermediate_size=512,
    )  # fmt: skip


def trained(ids: torch.Tensor, n_steps: int) -> GPT:
    torch.manual_seed(1)
    gpt = GPT(config())
    gpt.apply(gpt._init_weights)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=n_steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(2)
    for step in range(n_steps):
        starts = torch.randint(0, len(ids) - LENGTH - 1, (BATCH,), generator=generator)
        batch = torch.stack([ids[start : start + LENGTH + 1] for start in starts.tolist()])
        loss = F.cross_entropy(gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == n_steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return gpt.eval().requires_grad_(False)


def write(folder: Path, state: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    (folder / "model_config.yaml").write_text(yaml.safe_dump(asdict(config())), encoding="utf-8")
    torch.save(state, folder / "lit_model.pth")


def gpt_of(source: WeightSource, form: str | None, means: Any = None) -> GPT:
    """litgpt's model with the numbers that a format leaves of the weights."""
    packing = None if form is None else Packing(form, form, means=means)
    packed = source if packing is None else PackedSource(source, packing)
    gpt = GPT(config()).eval().requires_grad_(False)
    gpt.load_state_dict(
        {n: torch.as_tensor(t) for part in packed.part_names() for n, t in plain(packed.weights(part)).items()}
    )
    return gpt


def logits_of(gpt: GPT, ids: torch.Tensor) -> torch.Tensor:
    """Log probabilities (windows, LENGTH, vocabulary)"""
    windows = ids[: (len(ids) - 1) // LENGTH * LENGTH].reshape(-1, LENGTH)
    return torch.cat([gpt(some).log_softmax(dim=-1) for some in windows.split(BATCH)])


def measured(gpt: GPT, ids: torch.Tensor, exact: torch.Tensor | None = None) -> dict[str, float]:
    found = logits_of(gpt, ids)
    wanted = ids[1 : found.shape[0] * LENGTH + 1].reshape(-1, LENGTH)
    loss = F.nll_loss(found.flatten(0, 1), wanted.flatten()).item()
    result = {"perplexity": math.exp(loss)}
    if exact is not None:
        result["divergence"] = (exact.exp() * (exact - found)).sum(dim=-1).mean().item()
    return result


def of_llama_cpp(plain_file: Path, path: Path) -> bool:
    """Write its Q4_K_M of a file; whether it is here."""
    try:
        import llama_cpp
    except ImportError:
        return False
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = Q4_K_M
    done = llama_cpp.llama_model_quantize(str(plain_file).encode(), str(path).encode(), params)
    if done:
        raise SystemExit(f"llama_model_quantize: {done}")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, help="folder of the trained model (default: a new one, which is removed)")
    parser.add_argument("--text", type=Path, help="(default: Python's documentation)")
    parser.add_argument("--steps", type=int, default=400, metavar="N")
    add_json_flag(parser, "quantizing")
    args = parser.parse_args()
    topics = pydoc_data.topics.topics
    text = args.text.read_text(encoding="utf-8") if args.text else "\n".join(topics[name] for name in sorted(topics))
    codec = TextCodec.from_checkpoint(TOKENIZER, "none")
    ids = torch.tensor(codec.encode(text))
    learned, calibrating, held_out = ids.tensor_split([len(ids) * 8 // 10, len(ids) * 9 // 10])
    calibrating, held_out = calibrating[:N_TOKENS], held_out[:N_TOKENS]
    with tempfile.TemporaryDirectory() as folder:
        ckpt = args.ckpt or Path(folder) / "small"
        if not (ckpt / "lit_model.pth").is_file():
            write(ckpt, trained(learned, args.steps).state_dict())
        rows: list[dict[str, Any]] = []
        for kind in ("plain", "planted"):
            source: WeightSource = LitCheckpoint(ckpt)
            if kind == "planted":
                changed = planted(source)
                write(Path(folder) / kind, {name: torch.as_tensor(changed.array(name)) for name in changed.specs})
                source = LitCheckpoint(Path(folder) / kind)
            exact_gpt = gpt_of(source, "float32")
            exact = logits_of(exact_gpt, held_out)
            rows.append({"model": kind, "format": "float32", **measured(exact_gpt, held_out, exact)})
            means = mean_squares(source, [one.tolist() for one in calibrating.split(LENGTH)])
            formats = [("int8", None), ("int4", None), ("q4_k", None), ("q4_k, calibrated", means), ("q6_k", None)]
            for name, known in formats:
                gpt = gpt_of(source, meant(name.partition(",")[0], source.config), known)
                rows.append({"model": kind, "format": name, **measured(gpt, held_out, exact)})
            f16, theirs = (Path(folder) / f"{kind}-{name}.gguf" for name in ("f16", "q4_k_m"))
            export_gguf(PackedSource(source, Packing("fp16", "fp16")), TOKENIZER, f16)
            if of_llama_cpp(f16, theirs):
                file = GgufSource(theirs)
                gpt = gpt_of(file, file.own_formats)
                rows.append({"model": kind, "format": "llama.cpp's Q4_K_M", **measured(gpt, held_out, exact)})
    for row in rows:
        print(
            f"{row['model']:<8} {row['format']:<20} perplexity {row['perplexity']:8.4f}   divergence {row['divergence']:.6f}"
        )
    save(args.json, {"rows": rows, "n_tokens": len(held_out)})


if __name__ == "__main__":
    main()
