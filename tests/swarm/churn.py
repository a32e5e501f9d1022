"""A standing swarm of real processes whose nodes come and go, while several starters generate over it.

The first nodes and every third one after them have the model on their disks; to the others its parts come from them. Every few
seconds a node is killed, asked to end, or halted for a time, or one comes; now and then a starter is killed. Each starter makes
one run after the other. Every text must be that of a single node, and every run must end.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mdi.net.keys import new_secret, write_keys
from mdi.run.local import free_ports

ROOT = Path(__file__).resolve().parents[2]
NAME = "churned"
PROMPTS = ("Once upon a time", "The little dog", "In the morning")
N_TEXTS = 4  # of a run, at the same time
FLAGS = ("--temperature", "0", "--json", "--no-journal", "--threads", "1")
RUN_S = 240.0  # a run that takes longer hangs


class Churn:
    """See the module.

    Args:
        folder: for caches, logs and the key.
        n_nodes: that there shall be; each holds `most_blocks` at most.
        n_tokens: of each text.
        n_whole: of the first nodes, how many have the model on their disks.

    Attributes:
        counts: what has happened, by name.
        wrong: texts that were not those of a single node; failures: last lines of runs that failed.
    """

    def __init__(
        self,
        folder: Path,
        n_nodes: int,
        seed: int,
        most_blocks: int,
        n_tokens: int,
        ckpt: Path,
        n_whole: int,
    ) -> None:
        self.folder, self.n_nodes, self.rng = folder, n_nodes, random.Random(seed)
        self.most_blocks, self.n_tokens, self.ckpt = most_blocks, n_tokens, folder / NAME
        self.n_whole = n_whole
        shutil.copytree(ckpt, self.ckpt)
        config = self.ckpt / "model_config.yaml"
        config.write_text(
            re.sub(r"(?m)^name: .*$", f"name: {NAME}", config.read_text())
        )  # no name that is known elsewhere
        self.key = folder / "cluster.key"
        write_keys(self.key, (new_secret(),))
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}  # by control port
        self.halted: dict[int, float] = {}
        self.starters: dict[int, subprocess.Popen[str]] = {}
        self.counts: Counter[str] = Counter()
        self.wrong: list[Any] = []
        self.failures: list[str] = []
        self._has_ended = threading.Event()
        self._n_started = 0
        self._lock = threading.Lock()

    def command(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "mdi.cli", *map(str, words)]

    @property
    def environment(self) -> dict[str, str]:
        paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}

    def start_node(self) -> int:
        """Another standing node; its control port."""
        port, ring_port = free_ports(2)
        peers = [flag for one in self._living(3) for flag in ("--peer", f"127.0.0.1:{one}")]
        self._n_started += 1
        is_whole = self._n_started <= self.n_whole or self._n_started % 3 == 0
        cache = "cache" if is_whole else f"cache{self._n_started}"  # of the others, each has its own
        words = (
            "join", "--key", self.key, "--model", self.ckpt if is_whole else NAME, "--addr", "127.0.0.1", "--port", port,
            "--port-in", ring_port, "--max-blocks", self.most_blocks, "--threads", 1, "--no-announce",
            "--cache-dir", self.folder / cache, *peers,
        )  # fmt: skip
        with (self.folder / f"node{self._n_started}.log").open("wb") as log:
            self.nodes[port] = subprocess.Popen(
                self.command(*words), stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.environment
            )
        self.counts["came"] += 1
        return port

    def _living(self, n: int) -> list[int]:
        living = [port for port, one in self.nodes.items() if one.poll() is None and port not in self.halted]
        return self.rng.sample(living, min(n, len(living)))

    def texts(self, prompts: Sequence[str], n_samples: int, *flags: object) -> subprocess.Popen[str]:
        """A run that prints its texts as JSON."""
        asked = [flag for prompt in prompts for flag in ("--prompt", prompt)]
        words = (
            "starter",
            "--ckpt",
            self.ckpt,
            *asked,
            "--n-samples",
            n_samples,
            "--n-tokens",
            self.n_tokens,
            *FLAGS,
            *flags,
        )
        return subprocess.Popen(
            self.command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
            env=self.environment,
        )  # fmt: skip

    def reference(self) -> dict[str, list[int]]:
        """The text of each prompt, of one node."""
        alone = self.folder / "alone.json"
        entry = {"addr": "127.0.0.1", "communication": {"port": 0}, "inference": {"port_in": 0}}
        alone.write_text(json.dumps({"nodes": {"starter": entry, "secondary": []}}))
        out, err = self.texts(PROMPTS, len(PROMPTS), "--nodes-config", alone).communicate(timeout=RUN_S)
        assert out, err
        return {prompt: one["token_ids"] for prompt, one in zip(PROMPTS, json.loads(out)["samples"], strict=True)}

    def generate(self, number: int, wanted: dict[str, list[int]]) -> None:
        """One run after the other, in a thread, until the end."""
        for k in range(10**9):
            if self._has_ended.is_set():
                return
            prompt, living = PROMPTS[(number + k) % len(PROMPTS)], self._living(3)
            if not living:
                self._has_ended.wait(0.5)
                continue
            flags = ("--swarm", ",".join(f"127.0.0.1:{port}" for port in living), "--key", self.key, "--wait", 60)
            run = self.starters[number] = self.texts([prompt], N_TEXTS, *flags)
            try:
                out, err = run.communicate(timeout=RUN_S)
            except subprocess.TimeoutExpired:
                run.kill()
                out, err = run.communicate()
                err += "\nHANG"
            with self._lock:
                if run.returncode == -signal.SIGKILL and "HANG" not in err:
                    self.counts["starters killed"] += 1
                elif run.returncode:
                    self.failures.append(f"{run.returncode}: {err[-1000:]}{out[-1000:]}")  # where an error is an object
                else:
                    found = json.loads(out)
                    self.counts["texts"] += 1
                    self.counts["recoveries"] += len(found.get("recoveries", ()))
                    if any(sample["token_ids"] != wanted[prompt] for sample in found["samples"]):
                        self.wrong.append((prompt, [sample["token_ids"] for sample in found["samples"]]))

    def disturb(self) -> None:
        """One thing happens to the swarm; at least two thirds of the nodes stay."""
        now = time.monotonic()
        for port, until_s in list(self.halted.items()):
            if now > until_s:
                self.nodes[port].send_signal(signal.SIGCONT)
                del self.halted[port]
        for port in [port for port, one in self.nodes.items() if one.poll() is not None]:
            del self.nodes[port]
        living = self._living(self.n_nodes)
        if len(living) <= self.n_nodes * 2 // 3 + 1:
            if len(self.nodes) < self.n_nodes:
                self.start_node()
            return
        print(dict(self.counts), len(self.wrong), "wrong", self.failures, file=sys.stderr, flush=True)
        what, port = self.rng.choice(("kill", "kill", "leave", "halt", "starter", "come")), self.rng.choice(living)
        if what == "come" and len(self.nodes) < self.n_nodes:
            self.start_node()
        elif what == "kill":
            self.nodes[port].kill()
            self.counts["killed"] += 1
        elif what == "leave":
            self.nodes[port].terminate()
            self.counts["left"] += 1
        elif what == "halt":
            self.nodes[port].send_signal(signal.SIGSTOP)
            self.halted[port] = now + self.rng.uniform(2, 20)
            self.counts["halted"] += 1
        elif what == "starter" and self.starters:
            one = self.rng.choice(list(self.starters.values()))
            if one.poll() is None:
                one.kill()

    def run(self, n_starters: int, seconds: float, each_s: float) -> dict[str, Any]:
        """What has happened."""
        wanted = self.reference()
        first = self.start_node()
        end = time.monotonic() + RUN_S
        while b"holds blocks" not in (self.folder / "node1.log").read_bytes() and time.monotonic() < end:
            time.sleep(0.2)  # it measures the machine for all that share its cache
        for _ in range(self.n_nodes - 1):
            self.start_node()
        assert first in self.nodes
        threads = [threading.Thread(target=self.generate, args=(i, wanted)) for i in range(n_starters)]
        for one in threads:
            one.start()
        try:
            with_texts = time.monotonic() + RUN_S
            while not self.counts["texts"] and time.monotonic() < with_texts and not self.failures:
                time.sleep(0.2)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(self.rng.uniform(0.5, 1.5) * each_s)
                self.disturb()
        finally:
            self._has_ended.set()
            for port in self.halted:
                self.nodes[port].send_signal(signal.SIGCONT)
            for one in threads:
                one.join(2 * RUN_S)
            self.close()
        return {"counts": dict(self.counts), "wrong": self.wrong, "failures": self.failures}

    def close(self) -> None:
        for node in self.nodes.values():
            if node.poll() is None:
                node.kill()
            node.wait(30)
