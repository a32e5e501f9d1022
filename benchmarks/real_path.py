#!/usr/bin/env python3
"""What a user of two small machines does with Qwen3.6-35B-A3B, once, with weights of chance.

    benchmarks/real_path.py [--layers 16] [--memory 10] [--tokens 2000]      needs root: namespaces, and groups of memory

Two network namespaces are the machines, each with a group of memory of its own. A GGUF file of the model's shape is written,
mixed as Q4_K_M, with as many of its 40 layers as this machine has memory for. Then: `mdi key`, `mdi join`, `mdi plan`, `mdi
serve --machines 2`, a chat of so many tokens, and the same chat again, in which the joined machine is killed and comes back. It
prints what the plan said, and what was seen: memory, time to the first token, tokens/s, and whether the texts are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

import on_path
from mdi.checkpoint.gguftokenizer import tokenizer_fields
from mdi.checkpoint.hfconfig import PUBLISHED, derive_config
from mdi.checkpoint.shapes import model_shapes
from mdi.families.gguf import fields_of
from mdi.families.registry import stated_family
from mdi.files import default_cache_dir
from mdi.model.tensors import EMBEDDING
from memory_group import MemoryGroup, memory_group
from records import machine

SHAPE = "Qwen/Qwen3.5-35B-A3B"  # Qwen3.6's is the same
STATES = {
    "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 32, "ssm.inner_size": 4096,
    "expert_shared_feed_forward_length": 512, "full_attention_interval": 4,
}  # fmt: skip
TOKENIZER = on_path.ROOT / "assets" / "nano-llama"
FLOATS = ("_norm", "_inp", "ssm_conv1d", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")  # what Q4_K_M files have in F32
SCALES = {"Q4_K": {0: 4e-4, 2: 3e-3}, "Q6_K": {208: 3e-4}}  # of numbers around 0; byte of a block: float16
DEADLINE_S = 1800.0
CLIENT = """
import json, sys, time, urllib.request as u
begin, first, text = time.time(), 0.0, ""
asked = u.Request("http://127.0.0.1:8000/v1/completions", sys.argv[1].encode(), {"content-type": "application/json"})
for line in u.urlopen(asked, timeout=1800):
    if line.startswith(b"data: {"):
        found = json.loads(line[6:])
        text += "".join(choice["text"] for choice in found["choices"])
        first = first or (text and time.time() - begin)
print(json.dumps({"first_s": first, "whole_s": time.time() - begin, "text": text, "usage": found.get("usage")}))
"""


def write_model(path: Path, stated: dict[str, Any], more: dict[str, Any]) -> int:
    """A GGUF file of what a config.json states, with more fields of its family; its bytes."""
    config = derive_config(stated, path.stem, path)
    shapes = model_shapes(config, path.stem)
    family = stated_family(stated)
    assert family is not None and family.gguf is not None
    places = [piece for name, shape in shapes.items() for piece in family.gguf.names.places(name, shape, config)[0]]
    tensors = {piece.tensor: piece.shape for piece in places}
    own = {f"{family.gguf.architecture}.{name}": value for name, value in {**fields_of(config), **more}.items()}
    fields = {**own, "general.name": path.stem, **tokenizer_fields(TOKENIZER, shapes[EMBEDDING][0])}
    writer = GGUFWriter(path, family.gguf.architecture)
    for key, value in fields.items():
        add_field(writer, key, value)
    rng = np.random.default_rng(1)
    kinds = {name: kind_of(name, shape) for name, shape in tensors.items()}
    for name, shape in tensors.items():
        per_block, n_bytes = GGML_QUANT_SIZES[kinds[name]]
        stored = (*shape[:-1], shape[-1] // per_block * n_bytes)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in tensors.items():
        writer.write_tensor_data(numbers(rng, name, shape, kinds[name]))
    writer.close()
    return path.stat().st_size


def add_field(writer: GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


def kind_of(name: str, shape: tuple[int, ...]) -> GGMLQuantizationType:
    if len(shape) < 2 or any(word in name for word in FLOATS):
        return GGMLQuantizationType.F32
    return GGMLQuantizationType.Q6_K if name.startswith("output") else GGMLQuantizationType.Q4_K


def numbers(rng: np.random.Generator, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> np.ndarray:
    """Of chance: a few thousand blocks, repeated, because speed does not depend on what weights say."""
    if kind == GGMLQuantizationType.F32:
        if "ssm_a" in name and len(shape) == 1:
            return -np.ones(shape, np.float32)
        scale, mean = (0.02, 0.0) if len(shape) > 1 or "ssm_dt" in name else (0.02, 1.0)
        return rng.normal(mean, scale, shape).astype(np.float32)
    per_block, n_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (4099, n_bytes), dtype=np.uint8)
    if kind == GGMLQuantizationType.Q6_K:
        blocks[:, 192:208] = rng.integers(-20, 21, (len(blocks), 16)).astype(np.int8).view(np.uint8)
    for at, scale in SCALES[kind.name].items():
        blocks[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return np.resize(blocks, (*shape[:-1], shape[-1] // per_block * n_bytes))


class Machine:
    """A namespace with a group of memory, and a home of its own."""

    def __init__(self, host: str, group: MemoryGroup, home: Path) -> None:
        self.group, self.home = group, home
        self.inside = ["nsenter", f"--net=/run/netns/{host}"]  # unlike `ip netns exec`, it hides no groups
        compiled = home / ".cache" / "mdi-llm" / "kernels"
        compiled.parent.mkdir(parents=True)
        compiled.symlink_to(default_cache_dir() / "kernels")
        self.environment = {
            **os.environ,
            "HOME": str(home),
            "PYTHONPATH": str(on_path.ROOT / "src"),
            "PYTHONUNBUFFERED": "1",
        }

    def words(self, *words: object) -> list[str]:
        mdi = [sys.executable, "-m", "mdi", *map(str, words)]
        return self.group.command([*self.inside, *mdi])

    def start(self, *words: object) -> subprocess.Popen[str]:
        with open(self.home / f"{words[0]}.log", "a", encoding="utf-8") as log:
            return subprocess.Popen(self.words(*words), env=self.environment, stdout=log, stderr=log, text=True)

    def said(self, command: str, pattern: str) -> str:
        """The first line of a command with this pattern, as soon as it is there."""
        begin = time.monotonic()
        while time.monotonic() < begin + DEADLINE_S:
            if found := re.search(f".*{pattern}.*", (self.home / f"{command}.log").read_text(encoding="utf-8")):
                return found[0]
            time.sleep(0.2)
        sys.exit(f"{command} did not say {pattern!r}: {self.home}/{command}.log")


def ask(machine: Machine, prompt: str, n_tokens: int) -> dict[str, Any]:
    asked = {
        "prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    words = [*machine.inside, sys.executable, "-c", CLIENT, json.dumps(asked)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return dict(json.loads(done.stdout))


def path_of_a_user(folder: Path, model: Path, memory: int, n_tokens: int) -> None:
    from networks import network

    key, nodes = folder / "cluster.key", folder / "nodes.json"
    with ExitStack() as stack:
        hosts = stack.enter_context(network(2))
        groups = [stack.enter_context(memory_group(memory, f"mdi-path-{i}")) for i in range(2)]
        here, there = (Machine(host, group, folder / host) for (host, _), group in zip(hosts, groups, strict=True))
        subprocess.run(here.words("key", key), env=here.environment, check=True)
        join = ("join", "--key", key, "--addr", hosts[1][1], "--threads", 1)
        running = [there.start(*join)]
        stack.callback(lambda: [one.kill() or one.wait() for one in running if one.poll() is None])
        there.said("join", "waits|listens|ready")
        ports = {"communication": {"port": 8088}, "inference": {"port_in": 5088, "port_out": 5089}, "threads": 1}
        both = [{"addr": addr, **ports} for _, addr in hosts]
        nodes.write_text(json.dumps({"nodes": {"starter": both[0], "secondary": both[1:]}}))
        plan = here.words("plan", model, "--nodes-config", nodes, "--key", key, "--prompt-tokens", n_tokens // 2,
                          "--sequence-length", 4096)  # fmt: skip
        print(subprocess.run(plan, env=here.environment, capture_output=True, text=True, check=True).stdout, flush=True)
        begin = time.monotonic()
        server = here.start("serve", model, "--machines", 2, "--key", key, "--threads", 1, "--sequence-length", 4096)
        running.append(server)
        here.said("serve", "ready: ")
        print(f"serve is ready after {time.monotonic() - begin:.0f} s", flush=True)
        prompt = "".join(f"{i}. And then? " for i in range(10_000))[: n_tokens // 2 * 3]
        first = ask(here, prompt, n_tokens // 2)
        tell("a chat", first, groups)

        def kill() -> None:
            running[0].send_signal(signal.SIGKILL)
            running[0].wait()
            time.sleep(5)
            running[0] = there.start(*join)

        killer = threading.Timer((first["whole_s"] - first["first_s"]) / 3, kill)  # the prompt is still in the caches
        killer.start()
        second = ask(here, prompt, n_tokens // 2)
        killer.join()
        tell("again, with the machine killed in mid-text, and back after 5 s", second, groups)
        print("the texts are the same" if first["text"] == second["text"] else "THE TEXTS DIFFER")
        print(
            *re.findall(".*(?:lost|again|goes on|new ring).*", (here.home / "serve.log").read_text(encoding="utf-8")),
            sep="\n",
        )
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def tell(what: str, found: dict[str, Any], groups: list[MemoryGroup]) -> None:
    usage, first_s = found["usage"], found["first_s"]
    rate = (usage["completion_tokens"] - 1) / (found["whole_s"] - first_s)
    peaks = " and ".join(f"{group.peak_bytes() / 1e9:.1f} GB" for group in groups)
    print(
        f"{what}: the first token after {first_s:.1f} s ({usage['prompt_tokens']} of the prompt), then {rate:.1f} tokens/s; "
        f"memory at most {peaks}, {sum(group.n_killed() for group in groups)} processes killed for it",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="of 40 (%(default)s)")
    parser.add_argument("--memory", type=float, default=10.0, metavar="GB", help="of each machine (%(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=2000, help="of the chat: half of them are the prompt (%(default)s)"
    )
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="real-path-") as name:
        model = Path(name) / "qwen-path.gguf"
        n_bytes = write_model(model, {**PUBLISHED[SHAPE], "num_hidden_layers": args.layers}, STATES)
        print(f"{args.layers} of the 40 layers of {SHAPE}: {n_bytes / 1e9:.1f} GB", flush=True)
        path_of_a_user(Path(name), model, int(args.memory * 1e9), args.tokens)


if __name__ == "__main__":
    main()
