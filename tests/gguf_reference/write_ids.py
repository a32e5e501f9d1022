#!/usr/bin/env python3
"""Write llama_cpp_ids.json: greedy ids of llama.cpp for the nano-llama in GGUF files, which test_gguf.py compares with.

PYTHONPATH=src:tests:benchmarks python tests/gguf_reference/write_ids.py --peers-python PYTHON_WITH_LLAMA_CPP_PYTHON
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NANO = ROOT / "assets" / "nano-llama"
PROMPTS = ("ROMEO:", "JULIET:\nO", "First Citizen:\nBefore we proceed", "KING RICHARD III:")
N_TOKENS = 32
FORMATS = ("F16", "Q8_0")


def write_nano(path: Path, matrices: str) -> Path:
    """The nano-llama as a GGUF file without a tokenizer, always the same bytes."""
    import torch
    from litgpt.config import Config

    from gguf_files import write_gguf

    state = torch.load(NANO / "lit_model.pth", weights_only=True)
    return write_gguf(path, "Llama-3.1-8B", Config.from_file(NANO / "model_config.yaml"), state, matrices)


def prompt_ids() -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


def of_llama_cpp(gguf: str, prompts: list[list[int]]) -> dict[str, Any]:
    """In the other interpreter: one text after the other."""
    import llama_cpp

    from peers.llama_cpp_peer import LlamaCppPeer
    from peers.protocol import Case

    class Text(Case):
        def prompt(self, index: int) -> list[int]:
            return text

    defaults = llama_cpp.llama_model_default_params()
    defaults.use_extra_bufts = False  # weights as they lie in the file: some builds' repacked ones end with SIGILL
    llama_cpp.llama_model_default_params = lambda: defaults
    peer = LlamaCppPeer({"gguf": gguf, "threads": 1})
    found = []
    for text in prompts:
        found += peer.run(Text(1, len(text), N_TOKENS))["ids"]
    return {"version": llama_cpp.__version__, "ids": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.of:
        print(json.dumps(of_llama_cpp(args.of, json.loads(sys.stdin.read()))))
        return
    prompts, written = prompt_ids(), {}
    with tempfile.TemporaryDirectory() as folder:
        for matrices in FORMATS:
            path = write_nano(Path(folder) / "nano.gguf", matrices)
            done = subprocess.run(
                [args.peers_python, __file__, "--of", str(path)], input=json.dumps(prompts), capture_output=True, text=True,
                check=True,
            )  # fmt: skip
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            written[matrices] = {"sha256": sha256, **json.loads(done.stdout.splitlines()[-1])}
    (HERE / "llama_cpp_ids.json").write_text(json.dumps({"prompts": prompts, "of": written}) + "\n")


if __name__ == "__main__":
    main()
