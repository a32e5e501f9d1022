#!/usr/bin/env python3
"""Three small machines beside one large one, with a model that none of the three holds: tokens/s of 1 and of 16 texts.

    benchmarks/three_machines.py [--layers 32] [--memory 2.4] [--share 0.6] [--rounds 2]     needs root

The three are network namespaces joined by a switch (0.4 ms there and back, 940 Mbit/s: Gigabit Ethernet), each with a share of
one core and a group of memory. The large one has the same share of a core and no limit of memory. The model is a GGUF file in
the shape of Llama 3.1 8B, mixed as Q4_K_M, with weights of chance. All of them are `mdi join` and `mdi serve`; the shares begin
when the weights are there. A text counts from its first token on.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

import on_path  # noqa: F401
from memory_group import MemoryGroup, memory_group
from real_path import Machine, ask, write_model
from records import add_json_flag, parsed, save, told
from ring.quota import Quotas
from slow_hosts import GIGABIT, SlowHosts

SHAPE = {  # of Llama 3.1 8B
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
PROMPT = "Once upon a time there were three small machines."
N_TOKENS = 24  # of each text
N_TEXTS = (1, 16)
NO_LIMIT = 1 << 40


def measure(folder: Path, model: Path, n_machines: int, memory: int, share: float, rounds: int) -> dict[str, Any]:
    """Serve the model on so many machines of so many bytes, and ask; raises SystemExit if they do not become ready."""
    with ExitStack() as stack:
        hosts = SlowHosts(max(2, n_machines), *GIGABIT)
        stack.callback(hosts.close)
        quotas = Quotas()
        groups: list[MemoryGroup] = []
        machines: list[Machine] = []
        for i in range(n_machines):
            groups.append(stack.enter_context(memory_group(memory, f"mdi-three-{i}")))
            machines.append(Machine(hosts.names[i], groups[i], folder / f"{n_machines}-{i}"))
        stack.callback(quotas.close)
        running: list[subprocess.Popen[str]] = []
        stack.callback(lambda: [one.wait(60) for one in running])
        stack.callback(lambda: [one.send_signal(signal.SIGTERM) for one in running])
        key = folder / f"{n_machines}.key"
        subprocess.run(machines[0].words("key", key), env=machines[0].environment, check=True)
        for i in range(1, n_machines):
            running.append(machines[i].start("join", "--key", key, "--addr", hosts.address(i), "--threads", 1))
            machines[i].said("join", "waits|listens|ready")
        cluster = ("--machines", n_machines, "--key", key, "--addr", hosts.address(0), "--placement", "even")
        own = ("--threads", 1, "--sequence-length", 256, "--draft", "none")
        begin = time.monotonic()
        running.append(machines[0].start("serve", model, *(cluster if n_machines > 1 else ()), *own))
        machines[0].said("serve", "ready: ")
        ready_s = time.monotonic() - begin
        ask(machines[0], PROMPT, 2)
        for one in running:
            quotas.limit(one.pid, share, *(child.pid for child in psutil.Process(one.pid).children(recursive=True)))
        found: dict[str, Any] = {"machines": n_machines, "ready_s": ready_s}
        for n_texts in N_TEXTS:
            rates = [texts(machines[0], n_texts, N_TOKENS) for _ in range(rounds)]
            print(f"{n_machines} machines, {n_texts} texts: {rates} tokens/s", flush=True)
            found[f"tokens_s_{n_texts}"] = rates
        found["peak_bytes"] = [group.peak_bytes() for group in groups]
        found["n_killed"] = sum(group.n_killed() for group in groups)
        return found


def texts(machine: Machine, n_texts: int, n_tokens: int) -> float:
    """tokens/s of so many texts at once: the sum of what each has from its first token on."""
    with ThreadPoolExecutor(n_texts) as threads:
        answers = list(threads.map(lambda i: ask(machine, f"{i}. {PROMPT}", n_tokens), range(n_texts)))
    if any(answer["usage"]["completion_tokens"] != n_tokens for answer in answers):
        sys.exit(f"a text ended too early: {answers}")
    return sum((n_tokens - 1) / (answer["whole_s"] - answer["first_s"]) for answer in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="of the model (%(default)s)")
    parser.add_argument("--memory", type=float, default=2.4, metavar="GB", help="of each small machine (%(default)s)")
    parser.add_argument("--share", type=float, default=0.6, help="of a core, that each machine has (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", type=Path, metavar="FILE", help="keep the GGUF file there, for another time")
    add_json_flag(parser, "three_machines")
    args = parsed(parser)
    with tempfile.TemporaryDirectory(prefix="three-machines-") as name:
        model = args.model or Path(name) / "llama-8b.gguf"
        if not model.is_file():
            write_model(model, {**SHAPE, "num_hidden_layers": args.layers}, {})
        print(f"a file of {model.stat().st_size / 1e9:.2f} GB", flush=True)
        found = []
        for n_machines, memory in ((3, int(args.memory * 1e9)), (1, NO_LIMIT)):
            found.append(measure(Path(name), model, n_machines, memory, args.share, args.rounds))
            print(json.dumps(found[-1]), flush=True)
        result = {**told(args, "json", "model"), "file_bytes": model.stat().st_size, "cases": found}
    for n_texts in N_TEXTS:
        three, one = (statistics.median(case[f"tokens_s_{n_texts}"]) for case in found)
        print(f"{n_texts} texts: {three:.2f} tokens/s on three, {one:.2f} on one: {three / one:.2f} times")
    save(args.json, result)


if __name__ == "__main__":
    main()
