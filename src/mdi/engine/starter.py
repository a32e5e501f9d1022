"""The loop of the starter: schedule, compute, send; receive, sample, update. It knows token ids, not text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import torch

from mdi.engine.memory import CacheMemory
from mdi.engine.sampling import Sampler
from mdi.engine.scheduler import CHUNK_ROWS, DECODE_ROWS, Event, Plan, Scheduler
from mdi.engine.sequence import SamplingParams, Sequence
from mdi.engine.tensors import frame_of, logit_rows, rows_of
from mdi.errors import EngineError, UsageError
from mdi.model.stage import StarterStage
from mdi.net.ring import Ring
from mdi.net.wire import Frame, Slice

# Called with what happened to one sequence and when (time.perf_counter()), between two frames: it must be short.
OnEvent = Callable[[Event, float], None]


_DROPPED = SamplingParams(temperature=0)


class StarterEngine:
    """Drives the generation of all sequences over a ring of any length, one node included.

    `submit` and `cancel` may be called from any thread, and from an event callback, while `run` is running.

    Args:
        stage: the starter's own part of the model, loaded and prepared.
        ring: formed; a LoopbackRing if there are no other nodes.
        epoch: run id.
        n_nodes: length of the ring.
        max_length: tokens that a sequence may reach, prompt included.
        chunk_rows, memory, decode_rows, n_frames: see Scheduler; as many frames as nodes, if nothing is said.
        wire: what the rows travel as (net.wire.WIRE_DTYPES).
        scheduler: one of another mind, instead of that of the arguments before.
    """

    def __init__(
        self,
        stage: StarterStage,
        ring: Ring,
        epoch: int,
        n_nodes: int,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype,
        chunk_rows: int = CHUNK_ROWS,
        memory: CacheMemory | None = None,
        decode_rows: int = DECODE_ROWS,
        n_frames: int | None = None,
        wire: str = "auto",
        scheduler: Scheduler | None = None,
    ) -> None:
        self._stage = stage
        self._ring = ring
        self._epoch = epoch
        self._n_nodes = n_nodes
        self._max_length = max_length
        self._device = device
        self._dtype = dtype
        self._wire = "auto" if n_nodes == 1 else wire  # alone, nothing travels
        self._scheduler = scheduler or Scheduler(n_frames or n_nodes, chunk_rows, memory, decode_rows)
        self._sampler = Sampler()
        self._live: dict[int, tuple[SamplingParams, OnEvent]] = {}
        self._lock = threading.RLock()
        self._next_id = 0
        self._closing = False
        self.compute_s = 0.0

    def submit(self, prompt_ids: Iterable[int], params: SamplingParams, on_event: OnEvent) -> int:
        """Queue a sequence; returns its seq_id. What becomes of it is told to `on_event`.

        Raises:
            UsageError: the prompt is empty or does not fit, or no node's caches could ever hold the sequence.
        """
        prompt = tuple(prompt_ids)
        if not prompt:
            raise UsageError("a prompt without any token cannot be continued")
        if len(prompt) > self._max_length:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, but a sequence can have {self._max_length} (--sequence-length)"
            )
        with self._lock:
            sequence = Sequence(self._next_id, prompt, params, self._max_length)
            if (reason := self._scheduler.refusal(sequence)) is not None:
                raise UsageError(reason)
            self._next_id += 1
            self._live[sequence.seq_id] = (params, on_event)
            self._scheduler.submit(sequence)
        self._ring.wake()
        return sequence.seq_id

    def cancel(self, seq_id: int, reason: str = "cancelled") -> None:
        """End a sequence; its last event carries `reason`. One that has ended already is left alone."""
        with self._lock:
            event = self._scheduler.cancel(seq_id, reason)
            if event is not None:
                self._emit([event], time.perf_counter())
        self._ring.wake()

    def close(self) -> None:
        """Let `run` return; the sequences in flight stay unfinished."""
        self._closing = True
        self._ring.wake()

    def run(self, until_idle: bool = True) -> None:
        """Generate until nothing is left to do, or, with `until_idle` false, until `close`.

        Raises:
            NodeLostError, RingError: the ring broke; what each sequence had reached is known from the events.
        """
        while not self._closing:
            ended = self._ring.ended  # asked before recv(), which raises if it was a failure that ended the run
            with self._lock:
                while not ended and (plan := self._scheduler.schedule()) is not None:
                    self._launch(plan)
                if until_idle and not self._scheduler.has_work:
                    return
            frame = self._ring.recv()
            if frame is not None:
                with self._lock:
                    self._land(frame)
            elif ended:
                break
        if until_idle and not self._closing:
            raise EngineError("the run was stopped before its sequences were finished")

    def _launch(self, plan: Plan) -> None:
        """Embed the rows of a plan, run the starter's own blocks over them, and send them off."""
        begin = time.perf_counter()
        for seq_id in plan.freed:
            self._stage.caches.free(seq_id)
        slices = tuple(Slice(s.seq_id, s.start, s.n_rows, s.n_logits) for s in plan.slices)
        ids = [token for s in plan.slices for token in s.ids]
        if ids:
            x = self._stage.embed(torch.tensor(ids, device=self._device))
            x = self._stage(x, [(s.seq_id, s.start, s.n_rows) for s in slices])
        else:
            x = torch.empty(0, self._stage.config.n_embd, dtype=self._dtype)
        if self._n_nodes == 1:
            x = logit_rows(x, slices)
        frame = frame_of(x, self._epoch, plan.number, slices, plan.freed, self._wire)
        self.compute_s += time.perf_counter() - begin
        self._ring.send(frame)

    def _land(self, frame: Frame) -> None:
        """Final norm, head and sampling for the rows that came back."""
        begin = time.perf_counter()
        wanting = [s.seq_id for s in frame.slices if s.n_logits]
        tokens: dict[int, int] = {}
        if wanting:
            x = rows_of(frame, self._stage.returned_width, self._device, self._dtype)
            if x.size(0) != len(wanting):
                raise EngineError(f"{x.size(0)} rows came back for {len(wanting)} sequences")
            if not bool(torch.isfinite(x).all()):
                raise EngineError(
                    "what came back from the blocks is not finite: an overflow, most likely of float16 on one of the nodes "
                    "(--dtype float32 or bfloat16 there), or damaged weights"
                )
            logits = self._stage.head(x)
            drawn = self._sampler.sample(logits, self._who(wanting))
            tokens = dict(zip(wanting, drawn, strict=True))
        self._ring.release(frame)
        self.compute_s += time.perf_counter() - begin
        self._emit(self._scheduler.update(frame.number, tokens), time.perf_counter())

    def _who(self, seq_ids: list[int]) -> list[tuple[int, SamplingParams]]:
        """Parameters by row; a sequence that was cancelled on the way is drawn greedily, and the token dropped."""
        return [(seq_id, self._live[seq_id][0] if seq_id in self._live else _DROPPED) for seq_id in seq_ids]

    def _emit(self, events: list[Event], now: float) -> None:
        for event in events:
            if event.seq_id not in self._live:
                continue  # the callback of another event has just cancelled it
            _, on_event = self._live[event.seq_id]
            if event.finish_reason:
                del self._live[event.seq_id]
                self._sampler.forget(event.seq_id)
            on_event(event, now)
