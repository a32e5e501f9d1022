"""The measurements of a run: per sample, per node and in total, as JSON and as CSV files (as a table: mdi.run.report).

It takes the measurements as they are given; how they were taken, and who draws them, is not its business.
All times of tokens count from the moment the run was ready.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from mdi.errors import ControlError, UsageError
from mdi.files import replacing
from mdi.spec.decode import Meta, Name, Span, Text, Whole, decode, spans_rise

LONGEST_S = 1e15  # a node's times, in seconds
Duration = Annotated[float, Meta(ge=0, le=LONGEST_S)]
TIME_RUN_HEADER = "timestamp,n_samples,n_layers,context_size,gen_time"


@dataclass(frozen=True)
class ShareMetrics:
    """A node's share of every block of its stage, and what sums over the nodes of its group took.

    Attributes:
        group: the name of that.
        heads, kv_groups, mlp_columns: [start, stop) of them.
        reduces: sums that it took part in; reduce_s in all, waiting for the others included;
            reduce_median_s of the last ones.
        reduce_bytes_sent: to all other nodes together.
    """

    group: Text
    heads: Span
    kv_groups: Span
    mlp_columns: Span
    reduces: Whole
    reduce_s: Duration
    reduce_bytes_sent: Whole
    reduce_median_s: Duration = 0.0

    def to_json(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class NodeMetrics:
    """Measurements of one node in a run.

    Attributes:
        layers: its blocks, [start, stop) with global numbers.
        compute_s, wait_s, send_s: computing, waiting for a frame, writing to the socket (in a thread of its own, so
            the three may overlap).
        bytes_sent: over its outgoing ring link, headers included.
        frames: frames that it worked on.
        weights_resident_bytes, weights_read_bytes: of memory that its weights took at most, and from the disk.
        disk_wait_s: while which computing waited for them; part of compute_s.
        expert_hits, expert_misses: of the experts that frames chose, those in memory and those read from the disk, where they
            are read one by one.
        share: of every block, where nodes compute them together.
    """

    name: Name
    layers: Span
    peak_rss_bytes: Whole
    compute_s: Duration
    wait_s: Duration
    send_s: Duration
    bytes_sent: Whole
    frames: Whole
    weights_resident_bytes: Whole = 0
    weights_read_bytes: Whole = 0
    disk_wait_s: Duration = 0.0
    expert_hits: Whole = 0
    expert_misses: Whole = 0
    share: ShareMetrics | None = None

    def to_json(self) -> dict[str, Any]:
        fields = {**asdict(self), "layers": list(self.layers)}
        del fields["share"]
        return fields if self.share is None else {**fields, **self.share.to_json()}

    @classmethod
    def from_json(cls, data: Any, where: str = "node metrics") -> NodeMetrics:
        """Read what another node sent.

        Raises:
            ControlError: a field of `to_json` is missing or of another type; names `where` and the field.
        """
        own = {key: value for key, value in data.items() if key != "share"} if isinstance(data, dict) else data
        node = decode(cls, own, where, ControlError)
        share = decode(ShareMetrics, data, where, ControlError) if "heads" in data else None
        spans_rise(where, ControlError, layers=node.layers)
        if share is not None:
            spans_rise(where, ControlError, heads=share.heads, kv_groups=share.kv_groups, mlp_columns=share.mlp_columns)
        return replace(node, share=share)


@dataclass(frozen=True)
class SampleMetrics:
    """One sample: its text, and when its tokens came.

    Attributes:
        text: generated text, without the prompt.
        token_ids: generated ids, without the EOS or the stop sequence of ids that ended them.
        finish_reason: "eos", "stop", "length", or another reason; None if the run ended first.
        ttft_s: time to first token; None if none came.
        tokens_per_s: after the first token; 0 if there were fewer than two. Of tokens that all came at once, as those of beams
            do, from the beginning on.
        token_times_s: when each of them came, rising; tokens that might have become a stop sequence come together.
        guessed, confirmed: guesses of its tokens that were sent, and those that were drawn. The tokens of a round, the one that
            was drawn and those guessed behind which it follows, have the same time.
        may_differ_from: number of the first token, counted from 0, that may be another one than in an undisturbed run; None if
            all are the same.
    """

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    finish_reason: str | None
    ttft_s: float | None
    tokens_per_s: float
    token_times_s: tuple[float, ...] = ()
    may_differ_from: int | None = None
    guessed: int = 0
    confirmed: int = 0

    @classmethod
    def from_times(
        cls,
        prompt: str,
        text: str,
        token_ids: Iterable[int],
        prompt_ids: Iterable[int],
        finish_reason: str | None,
        token_times_s: Iterable[float],
        guessed: int = 0,
        confirmed: int = 0,
    ) -> SampleMetrics:
        """Work out `ttft_s` and `tokens_per_s` from the times of the tokens."""
        times = tuple(token_times_s)
        came_at_once = len(times) > 1 and times[0] == times[-1]
        return cls(
            prompt=prompt,
            text=text,
            token_ids=tuple(token_ids),
            prompt_ids=tuple(prompt_ids),
            finish_reason=finish_reason,
            ttft_s=times[0] if times else None,
            tokens_per_s=(
                _rate(len(times), times[0])
                if came_at_once
                else _rate(len(times) - 1, times[-1] - times[0] if times else 0)
            ),
            token_times_s=times,
            guessed=guessed,
            confirmed=confirmed,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_ids": list(self.prompt_ids),
            "finish_reason": self.finish_reason,
            "ttft_s": self.ttft_s,
            "tokens_per_s": self.tokens_per_s,
            "may_differ_from": self.may_differ_from,
            "guessed": self.guessed,
            "confirmed": self.confirmed,
            "tokens_per_round": tokens_per_round(len(self.token_ids), self.confirmed),
        }


@dataclass(frozen=True)
class RunMetrics:
    """A whole run.

    Attributes:
        model: name of the model.
        nodes: in ring order, the starter first.
        tokens_per_s: generated tokens of all samples over `duration_s`.
        duration_s: wall time from the moment the run was ready to its last token.
        recoveries: what became of each lost node, see mdi.run.report.
        has_inexact_guesses: guesses could change the last bits of a row, and so a token (--draft-inexact).
        verified: what --verify found, see mdi.run.verify.Verified; None without it.
        weights: the format of the blocks on the starter, in words.
    """

    model: str
    samples: tuple[SampleMetrics, ...]
    nodes: tuple[NodeMetrics, ...]
    tokens_per_s: float
    duration_s: float
    recoveries: tuple[dict[str, Any], ...] = ()
    has_inexact_guesses: bool = False
    verified: dict[str, Any] | None = None
    weights: str = ""

    @classmethod
    def from_parts(
        cls, model: str, samples: Iterable[SampleMetrics], nodes: Iterable[NodeMetrics], duration_s: float,
        recoveries: Iterable[dict[str, Any]] = (), has_inexact_guesses: bool = False, weights: str = "",
    ) -> RunMetrics:  # fmt: skip
        """Work out `tokens_per_s`."""
        samples = tuple(samples)
        n_tokens = sum(len(sample.token_ids) for sample in samples)
        rate = _rate(n_tokens, duration_s)
        found = tuple(recoveries), has_inexact_guesses
        return cls(model, samples, tuple(nodes), rate, duration_s, *found, weights=weights)

    @property
    def n_nodes(self) -> int:
        return len(self.nodes)

    @property
    def n_tokens(self) -> int:
        """Generated tokens of all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def guesses(self) -> tuple[int, int]:
        """Guessed tokens of all samples, and those of them that were drawn."""
        return sum(sample.guessed for sample in self.samples), sum(sample.confirmed for sample in self.samples)

    @property
    def tokens_per_round(self) -> float:
        """Tokens for each one that had to be waited for; 1 without guesses."""
        return tokens_per_round(self.n_tokens, self.guesses[1])

    @property
    def _is_one_group(self) -> bool:
        """Whether all nodes computed all blocks together."""
        return all(node.share is not None and node.layers == self.nodes[0].layers for node in self.nodes)

    @property
    def file_stem(self) -> str:
        """`<N>nodes_<model>_<S>samples`, as in the names of a run's files."""
        model = re.sub(r"[^\w.+-]+", "-", self.model).strip("-.") or "model"
        return f"{self.n_nodes}nodes_{model}_{len(self.samples)}samples"

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "samples": [sample.to_json() for sample in self.samples],
            "tokens_per_s": self.tokens_per_s,
            "n_nodes": self.n_nodes,
            "nodes": [node.to_json() for node in self.nodes],
            "model": self.model,
            "weights": self.weights,
            "recoveries": list(self.recoveries),
            "parallel": "tensor" if self._is_one_group else "ring",
            "guessed": self.guesses[0],
            "confirmed": self.guesses[1],
            "tokens_per_round": self.tokens_per_round,
            "inexact_guesses": self.has_inexact_guesses,
            **({} if self.verified is None else {"verified": self.verified}),
        }


def tokens_per_round(n_tokens: int, n_confirmed: int) -> float:
    """Tokens for each one that had to be waited for, if so many were guessed right; 1 without guesses."""
    n_rounds = n_tokens - n_confirmed
    return n_tokens / n_rounds if n_rounds > 0 else 1.0


def tokens_over_time(samples: Iterable[SampleMetrics]) -> list[tuple[float, int]]:
    """(time_s, tokens of all samples until then) for every token, in the order of time."""
    times = sorted(time_s for sample in samples for time_s in sample.token_times_s)
    return [(time_s, n) for n, time_s in enumerate(times, start=1)]


def write_tokens_csv(folder: str | Path, run: RunMetrics) -> Path:
    """Write `tokens_time_samples_<N>nodes_<model>_<S>samples.csv` (header `time_s,tokens`) into `folder`; it is made.

    Raises:
        UsageError: it cannot be written; an older file of that name is then still whole.
    """
    path = Path(folder) / f"tokens_time_samples_{run.file_stem}.csv"
    rows = "".join(f"{time_s:.6f},{n}\n" for time_s, n in tokens_over_time(run.samples))
    with replacing(path, UsageError, makes_folder=True) as file:
        file.write(f"time_s,tokens\n{rows}".encode())
    return path


def append_time_run(
    path: str | Path,
    *,
    n_samples: int,
    n_layers: int,
    context_size: int,
    gen_time_s: float,
    timestamp: datetime | None = None,
) -> None:
    """Append one row to the file of `--time-run`; a new file (and its folders) is made, with a header.

    Args:
        gen_time_s: duration of the generation, in seconds.
        timestamp: of the run; now if None.

    Raises:
        UsageError: it cannot be written.
    """
    moment = (timestamp or datetime.now()).isoformat(sep=" ", timespec="seconds")
    row = f"{moment},{n_samples},{n_layers},{context_size},{gen_time_s:.6f}\n".encode()
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered and in one write, so that the rows of two runs that end together do not mix.
        with open(path, "ab+", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end == 0:
                row = f"{TIME_RUN_HEADER}\n".encode() + row
            else:
                file.seek(end - 1)
                if file.read(1) != b"\n":
                    row = b"\n" + row
            if (file.write(row) or 0) < len(row):
                raise OSError("the disk is full")
    except OSError as e:
        raise UsageError(f"cannot add this run's time to {path}: {e.strerror or e}") from e


def peak_rss_bytes() -> int:
    """The most memory that this process has held."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    # getrusage's figure outlives exec on Linux: a small process started by a large one would report the large one's.
    with contextlib.suppress(OSError):
        found = re.search(rb"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_bytes(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _rate(count: int, time_s: float) -> float:
    return count / time_s if count > 0 and time_s > 0 else 0.0
