#!/usr/bin/env python3
"""What the ring costs beside the computing: the numbers of benchmarks/RESULTS.md, "Overheads".

    benchmarks/overheads.py [--json FILE] [--quick]

1. Round trip of an 8 KB activation between two processes over our links (queues, threads, CRC and all), beside a bare
   socket, our frames alone, and pickled tensors; they take turns in each round, so that a noisy neighbour hits all of them.
2. Bytes on the wire beyond the payload, per frame.
3. Start-up of a secondary: process start until it answers, and /init until READY with its chunk on disk.
4. Memory of a secondary in a run beyond its weights and caches, beside a process that only imports its libraries; it does
   without torch.
5. Time of `--help` of each launcher.

It makes its own model (random weights) in a temporary directory. Medians; nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from records import add_json_flag, machine, save
from round_trip import HOST, N_COLS, round_trips

SRC = Path(__file__).resolve().parents[1] / "src"

CONFIG = {"name": "overheads", "n_layer": 4, "n_embd": 1024, "n_head": 16, "n_query_groups": 4, "vocab_size": 1000,
          "padding_multiple": 8, "block_size": 512, "rotary_percentage": 1.0, "parallel_residual": False, "bias": False,
          "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 2816}  # fmt: skip
LAYERS = "1,3"  # blocks of the starter and of the secondary that is measured
BASELINE = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
from overheads import resident
import numpy, safetensors, cherrypy, requests
print(*resident(os.getpid()))
"""


# 2. Bytes on the wire


def wire_bytes() -> dict[str, int]:
    """Bytes of a frame beyond its payload."""
    from mdi.net.wire import PLAIN, Frame, FrameType, Slice

    def beyond(n_slices: int) -> int:
        slices = tuple(Slice(i, 100, 1, 1) for i in range(n_slices))
        payload = bytes(n_slices * N_COLS * 4)
        return len(PLAIN.head(Frame(FrameType.BATCH, 1, 1, "float32", n_slices, N_COLS, slices, (), payload)))

    return {"1 slice": beyond(1), "8 slices": beyond(8), "ping": len(PLAIN.head(Frame(FrameType.PING, 1)))}


# 3. and 4. A secondary


def make_model(folder: Path) -> None:
    """A LitGPT checkpoint with random weights, a tokenizer of digits, and its packed chunks for two nodes."""
    import torch
    import yaml
    from litgpt.config import Config
    from litgpt.model import GPT
    from tokenizers import Tokenizer, models, pre_tokenizers

    from mdi.checkpoint.chunks import write_chunks
    from mdi.checkpoint.derived import PackedSource
    from mdi.checkpoint.source import open_source
    from mdi.checkpoint.weights import own_packing

    folder.mkdir()
    torch.manual_seed(0)
    (folder / "model_config.yaml").write_text(yaml.safe_dump(CONFIG))
    torch.save(GPT(Config(**CONFIG)).state_dict(), folder / "lit_model.pth")
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(1000)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "1", "eos_token": "2"}')
    plain = open_source(folder)
    source = PackedSource(plain, own_packing(plain.dtype))
    write_chunks(source, folder, [int(n) for n in LAYERS.split(",")])
    source.close()


@contextlib.contextmanager
def secondary(folder: Path, chunk: Path) -> Iterator[tuple[subprocess.Popen[bytes], Any, Path, float]]:
    """A secondary process with its chunk: process, control client, nodes file, seconds until it answered.

    Args:
        folder: for its nodes file and its cache, where it keeps which files it has hashed.
    """
    from mdi.control.client import ControlClient
    from mdi.errors import ControlError
    from mdi.run.local import free_ports
    from mdi.spec.cluster import load_cluster

    ports = free_ports(4)
    entries = [{"addr": HOST, "communication": {"port": ports[i]}, "inference": {"port_in": ports[i + 1]}, "device": "cpu",
                "threads": 1} for i in (0, 2)]  # fmt: skip
    nodes = folder / "nodes.json"
    nodes.write_text(json.dumps({"nodes": {"starter": entries[0], "secondary": entries[1:]}}))
    command = [sys.executable, str(SRC / "secondary.py"), "--nodes-config", str(nodes), "0", "--chunk", str(chunk),
               "--cache-dir", str(folder / "cache"), "--quiet", "--until-stdin-closes"]  # fmt: skip
    client = ControlClient(load_cluster(nodes).secondaries[0])
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        while True:
            with contextlib.suppress(ControlError):
                client.status()
                break
            if process.poll() is not None:
                raise SystemExit(f"the secondary ended with status {process.returncode}")
            time.sleep(0.01)
        yield process, client, nodes, time.perf_counter() - begin
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


def start_up(folder: Path, n_repeats: int) -> dict[str, float]:
    """Medians in seconds, each process asked twice: with its chunk on disk, and with the stage still in memory."""
    times: dict[str, list[float]] = {"imports_s": [], "answers_s": [], "ready_from_disk_s": [], "ready_again_s": []}
    for _ in range(n_repeats):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", BASELINE], stdout=subprocess.DEVNULL, check=True)
        times["imports_s"].append(time.perf_counter() - begin)
        with secondary(folder, chunk_of(folder)) as (_, client, _, answers_s):
            times["answers_s"].append(answers_s)
            times["ready_from_disk_s"].append(time_until_ready(chunk_of(folder), client))
            times["ready_again_s"].append(time_until_ready(chunk_of(folder), client))
    return {name: statistics.median(values) for name, values in times.items()}


def chunk_of(folder: Path) -> Path:
    return folder / "model" / "chunks" / "2nodes" / "model_secondary0.safetensors"


def time_until_ready(path: Path, client: Any) -> float:
    """Seconds from /init until the status says READY; the run is then called off."""
    from mdi.checkpoint.chunks import ChunkFile
    from mdi.control.messages import InitRequest, PartSpec
    from mdi.spec.extent import Extent

    chunk = ChunkFile(path)
    manifest, run = chunk.manifest, f"{secrets.randbits(64):016x}"
    parts = tuple(PartSpec(p.name, p.sha256, p.n_bytes) for p in manifest.parts)
    request = InitRequest(
        run=run, epoch=run, index=1, names=("starter", "secondary0"), placement="overheads", next_addr=HOST, next_port=1,
        model=chunk.model_id, blocks=manifest.blocks, parts=parts, extent=Extent(manifest.config.block_size),
    )  # fmt: skip
    begin = time.perf_counter()
    client.init(request)
    while (status := client.status(run))["state"] != "READY":
        if status["state"] != "LOADING" or status["missing"]:
            raise SystemExit(f"the secondary did not take its weights from the chunk: {status}")
        time.sleep(0.002)
    ready_s = time.perf_counter() - begin
    client.stop(run)
    while client.status()["state"] not in ("IDLE", "READY") or client.status()["progress"] is not None:
        time.sleep(0.01)
    return ready_s


def resident(pid: int) -> tuple[int, int]:
    """Resident bytes of a process, and those of them that are no file's pages (-1 where the system does not tell)."""
    import psutil

    anonymous = -1
    with contextlib.suppress(OSError, TypeError):
        found = re.search(r"Anonymous: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
        anonymous = int(found[1]) * 1024  # type: ignore[index]
    return psutil.Process(pid).memory_info().rss, anonymous


def memory(folder: Path, n_samples: int = 4, n_tokens: int = 100) -> dict[str, int]:
    """Resident bytes of a secondary in a run, of its weights and caches, and of a process with the libraries alone."""
    from mdi.checkpoint.chunks import ChunkFile
    from mdi.kernels.pages import PAGE

    chunk = ChunkFile(chunk_of(folder))
    weights = sum(part.n_bytes for part in chunk.manifest.parts)
    positions = -(-(n_tokens + 8) // PAGE) * PAGE  # whole pages of float32 keys and values
    head_size = CONFIG["n_embd"] // CONFIG["n_head"]
    caches = n_samples * 3 * positions * CONFIG["n_query_groups"] * head_size * 2 * 4
    with secondary(folder, chunk_of(folder)) as (process, _, nodes, _):
        command = [
            sys.executable,
            str(SRC / "starter.py"),
            "--ckpt",
            str(folder / "model"),
            "--nodes-config",
            str(nodes),
        ]
        command += [
            "--prompt",
            "1 2 3 4 5 6 7 8",
            "--n-samples",
            str(n_samples),
            "--n-tokens",
            str(n_tokens),
            "--json",
            "--draft",
            "none",
        ]
        starter = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        most = (0, 0)
        while starter.poll() is None:
            most = max(most, resident(process.pid))
            time.sleep(0.02)
        if starter.returncode:
            raise SystemExit(f"the starter ended with status {starter.returncode}")
    done = subprocess.run([sys.executable, "-c", BASELINE], capture_output=True, text=True, check=True)
    alone, alone_anonymous = map(int, done.stdout.split())
    return {"rss_bytes": most[0], "weights_bytes": weights, "caches_bytes": caches, "imports_bytes": alone,
            "beyond_bytes": most[0] - weights - caches, "anonymous_beyond_bytes": most[1] - caches,
            "anonymous_imports_bytes": alone_anonymous}  # fmt: skip


# 5. --help


def help_times(n_repeats: int) -> dict[str, float]:
    """Median seconds of `--help`, by launcher."""
    times = {}
    for path in sorted(SRC.glob("*.py")):
        runs = []
        for _ in range(n_repeats):
            begin = time.perf_counter()
            done = subprocess.run([sys.executable, str(path), "--help"], capture_output=True, check=False)
            runs.append(time.perf_counter() - begin)
        if done.returncode == 0:
            times[path.name] = statistics.median(runs)
        else:
            print(f"{path.name} --help failed", file=sys.stderr)
    return times


def report(result: dict[str, Any]) -> None:
    print("\nround trip of 8 KB between two processes, us     median      p99   (medians of the rounds)")
    for name, t in result["round_trip"].items():
        low, high = t["lowest_round_median_us"], t["highest_round_median_us"]
        print(f"  {name:<44} {t['median_us']:8.0f} {t['p99_us']:8.0f}   ({low:.0f} to {high:.0f})")
    print("\nbytes of a frame beyond its payload: " + ", ".join(f"{k} {v}" for k, v in result["wire_bytes"].items()))
    s, m = result["start_up"], {name: n / 1e6 for name, n in result["memory"].items()}
    print(
        f"\nsecondary: answers {s['answers_s']:.2f} s after its start (importing the libraries alone: {s['imports_s']:.2f} s)"
    )
    print(
        f"READY after /init: {s['ready_from_disk_s']:.2f} s from its chunk on disk, {s['ready_again_s']:.3f} s from memory"
    )
    print(f"\nsecondary in a run, MB: {m['rss_bytes']:.0f} resident = {m['weights_bytes']:.0f} weights")
    print(
        f"  + {m['caches_bytes']:.1f} caches + {m['beyond_bytes']:.0f} beyond; importing its libraries alone takes "
        f"{m['imports_bytes']:.0f}"
    )
    print(
        f"  without the pages of files: {m['anonymous_beyond_bytes']:.0f} beyond its caches; the libraries "
        f"{m['anonymous_imports_bytes']:.0f}"
    )
    print("\n--help, s: " + ", ".join(f"{name} {t:.2f}" for name, t in result["help_s"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_flag(parser, "overheads")
    parser.add_argument("--quick", action="store_true", help="few repeats, to see that it works")
    args = parser.parse_args()
    n_rounds, n_trips, n_warm, n_repeats = (2, 50, 10, 1) if args.quick else (9, 500, 50, 3)
    result: dict[str, Any] = {"round_trip": round_trips(n_rounds, n_trips, n_warm)}
    result["wire_bytes"] = wire_bytes()
    with tempfile.TemporaryDirectory(prefix="mdi-overheads-") as name:
        folder = Path(name)
        make_model(folder / "model")
        result["start_up"] = start_up(folder, n_repeats)
        result["memory"] = memory(folder)
    result["help_s"] = help_times(n_repeats + 2)
    print(machine())
    report(result)
    if not args.quick:
        save(args.json, result)


if __name__ == "__main__":
    main()
