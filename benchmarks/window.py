#!/usr/bin/env python3
"""Models larger than memory: weights read from the disk while they are computed with, under a limit that kills.

    benchmarks/window.py CHECKPOINT [--memory 700000000] [--texts 8] [--tokens 8] [--peer-python PYTHON] [--json FILE]

CHECKPOINT has a chunk for one node in float32 (prepare_model.py CHECKPOINT --n-nodes 1 --quantize float32). In a control group
with the limit, each with the file out of the system's memory:

1. what the disk gives to one reader, direct, over the same file;
2. one text, and several at once, with --memory;
3. accelerate's disk offload (with --peer-python, an interpreter that has it and transformers) over weights of the same shape
   in Hugging Face's form, under the same limit, or the least of LIMITS that they run in.

Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import on_path
from memory_group import memory_group
from records import add_json_flag, save
from rings import after_first, asked

PEER = on_path.ROOT / "benchmarks" / "window_peer.py"
PROMPT = "The ring is closed link by link."
LIMITS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # times --memory, for a peer that is killed
PIECE_BYTES = 8 << 20
WINDOW_BYTES = 176 << 20  # of two units of the 1.1 B shape in float32
MARGIN_BYTES = 20_000_000  # of the group, for the shell and what is charged to it beside the process
DEADLINE_S = 900


def drop(paths: list[Path]) -> None:
    """Out of the system's memory."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def disk_bytes_s(path: Path, is_direct: bool, limit_s: float = 2.0) -> float:
    """Of one reader, piece after piece, into memory with large pages that is as large as a window: into a buffer that stays in
    the processor's caches, disks that are emulated give half as much again."""
    import mmap

    memory = mmap.mmap(-1, WINDOW_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = bytes(WINDOW_BYTES)
    view = memoryview(memory)
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
    done, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < limit_s:
        at = done % WINDOW_BYTES
        if (n := os.preadv(fd, [view[at : at + PIECE_BYTES]], done)) != PIECE_BYTES:
            break
        if not is_direct:
            os.posix_fadvise(fd, done, n, os.POSIX_FADV_DONTNEED)
        done += n
    spent = time.perf_counter() - begin
    os.close(fd)
    return done / spent


def ours(args: argparse.Namespace, chunk: Path, n_texts: int) -> dict[str, Any]:
    """A run with a window; times of the tokens after the first."""
    drop([chunk])
    begin = time.perf_counter()
    with memory_group(args.memory) as group:
        found, said = asked(
            "sample", "--ckpt", args.checkpoint, "--quantize", "float32", "--prompt", PROMPT, "--prompt-style", "none",
            "--n-samples", n_texts, "--n-tokens", args.tokens, "--temperature", 0, "--sequence-length", 64, "--draft", "none",
            "--threads", args.threads, "--memory", args.memory - MARGIN_BYTES, inside=group.command([]),
            environment={"OMP_NUM_THREADS": str(args.threads), "MDI_CACHE_DIR": args.cache},
        )  # fmt: skip
        peak = group.peak_bytes()
    node, (first_s, tokens_s) = found["nodes"][0], after_first(found)
    return {
        "texts": n_texts, "tokens_per_s": tokens_s, "first_token_s": first_s, "pass_s": n_texts / tokens_s,
        **{key: node[key] for key in ("weights_resident_bytes", "weights_read_bytes", "peak_rss_bytes")},
        "disk_wait_share": node["disk_wait_s"] / node["compute_s"],
        "read_bytes_s": node["weights_read_bytes"] / node["compute_s"],
        "group_peak_bytes": peak, "wall_s": time.perf_counter() - begin,
        "said": [line for line in said.splitlines() if "weights in memory" in line],
        "token_ids": found["samples"][0]["token_ids"],
    }  # fmt: skip


def peer(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """accelerate, under the same limit or the least that it runs in."""
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    tried = []
    for factor in LIMITS:
        limit = int(factor * args.memory)
        files = sorted(folder.glob("*.safetensors"))
        drop(files)
        disk = [disk_bytes_s(max(files, key=lambda f: f.stat().st_size), is_direct, 1.0) for is_direct in (True, False)]
        drop(files)
        words = (folder, limit, args.tokens, args.threads)
        with memory_group(limit) as group:
            command = group.command([args.peer_python, str(PEER), *map(str, words)])
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
            peak, n_killed = group.peak_bytes(), group.n_killed()
        error = done.stderr[-300:] if done.returncode else ""
        tried.append({"limit_bytes": limit, "status": done.returncode, "killed": n_killed, "error": error})
        if done.returncode == 0:
            return {**json.loads(done.stdout.splitlines()[-1]), "limit_bytes": limit, "group_peak_bytes": peak,
                    "disk_bytes_s_before": disk, "tried": tried}  # fmt: skip
    return {"tried": tried}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--memory", type=int, default=700_000_000)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-python")
    parser.add_argument("--peer-folder", type=Path, help="the same weights in float32 in Hugging Face's form")
    add_json_flag(parser, "window")
    args = parser.parse_args()
    chunk = args.checkpoint / "chunks" / "1nodes-float32" / "model_starter.safetensors"
    with tempfile.TemporaryDirectory() as cache:
        args.cache = cache
        result: dict[str, Any] = {"memory_bytes": args.memory, "threads": args.threads}
        drop([chunk])
        for n_texts in (1, args.texts):
            result[f"disk_bytes_s_{n_texts}"] = [disk_bytes_s(chunk, is_direct) for is_direct in (True, False)]
            print(result[f"disk_bytes_s_{n_texts}"], flush=True)
            found = ours(args, chunk, n_texts)
            result[f"texts_{n_texts}"] = found
            print(json.dumps(found), flush=True)
        result["gain_of_several"] = result[f"texts_{args.texts}"]["tokens_per_s"] / result["texts_1"]["tokens_per_s"]
        if args.peer_python:
            result["accelerate"] = peer(args, args.peer_folder)
            print(json.dumps(result["accelerate"]), flush=True)
    save(args.json, result)


if __name__ == "__main__":
    main()
