"""A whole ring inside one process: real TCP links over loopback, a starter engine and a thread per secondary."""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from litgpt.config import Config
from litgpt.model import GPT

from families import CONTEXT
from mdi.engine.kept_prefixes import KeptFiles
from mdi.engine.memory import CacheMemory
from mdi.engine.prefix_tasks import KEEP, PrefixTask, RingPrefixes
from mdi.engine.rows import TensorRows
from mdi.engine.scheduler import CHUNK_ROWS, DECODE_ROWS, Scheduler
from mdi.engine.sequence import Event, Request, SamplingParams, TokenLogprobs
from mdi.engine.starter import StarterEngine
from mdi.engine.worker import SecondaryLoop
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.rows import HIDDEN, Column, RowLayout
from mdi.net.handshake import close_starter_ring, join_ring
from mdi.net.hello import Fault
from mdi.net.keys import KeyFile
from mdi.net.listener import Expectation, RingListener, open_socket
from mdi.net.ring import LoopbackRing, Seat, TcpRing
from mdi.net.wire import Limits
from mdi.stages.torch_stage import Stage, StarterStage

CPU = torch.device("cpu")
PLACEMENT = "a" * 64
DEADLINE_S = 60.0  # of whatever must happen; far beyond what it takes


def stages_of(
    gpt: GPT, cuts: tuple[int, ...], config: Config | None = None, max_length: int = CONTEXT,
    kv_dtype: torch.dtype = torch.float32,
) -> list[Stage]:  # fmt: skip
    """The model in stages that end at `cuts`, loaded and prepared."""
    own = ModelConfig.from_litgpt(config or gpt.config)
    bounds = (0, *cuts, own.n_layer)
    stages: list[Stage] = [StarterStage(spec_of(own), bounds[1])]
    stages += [Stage(spec_of(own), a, b) for a, b in zip(bounds[1:], bounds[2:], strict=False)]
    load_from(gpt, stages)
    for stage in stages:
        stage.prepare(max_length, CPU, kv_dtype)
    return stages


def load_from(gpt: GPT, stages: list[Stage]) -> None:
    weights = gpt.state_dict()
    for stage in stages:
        wanted = stage.state_dict().keys()
        stage.load(["all"], lambda _, wanted=wanted: {k: weights[k] for k in wanted}, CPU, torch.float32)


def hidden_rows(width: int) -> RowLayout:
    """Rows without further columns."""
    return RowLayout((Column(HIDDEN, width),))


def even_cuts(n_layer: int, n_nodes: int) -> tuple[int, ...]:
    """Where the stages but the last end."""
    return tuple(n_layer * i // n_nodes for i in range(1, n_nodes))


def names_of(n_nodes: int) -> tuple[str, ...]:
    return ("starter", *(f"secondary{i}" for i in range(n_nodes - 1)))


def listener(name: str = "starter", keys: KeyFile | None = None) -> RingListener:
    return RingListener(open_socket("127.0.0.1", 0, "test"), name, keys)


def seats_of(ports: Sequence[int], epoch: int) -> list[Seat]:
    """The seats of a ring whose nodes listen on `ports`."""
    names = names_of(len(ports))
    following = [*ports[1:], ports[0]]
    return [Seat(epoch, i, names, PLACEMENT, "127.0.0.1", port) for i, port in enumerate(following)]


class Nodes:
    """The links of a ring: `rings[i]` is node i's; `socks[i]` its two sockets. Threads that joined are ended on close.

    Unless a test says otherwise, silence is borne for so long that a busy machine breaks no ring.
    """

    def __init__(
        self, n_nodes: int, epoch: int | None = None, capacity: int | None = None, keys: KeyFile | None = None,
        silence_s: float = DEADLINE_S,
    ) -> None:  # fmt: skip
        self.epoch = secrets.randbits(64) if epoch is None else epoch
        self.listeners = [listener(name, keys) for name in names_of(n_nodes)]
        seats = seats_of([one.port for one in self.listeners], self.epoch)
        self.seats = [replace(seat, keys=keys, silence_s=silence_s) for seat in seats]
        self.rings: list[TcpRing] = []
        joined: queue.Queue[tuple[int, TcpRing | BaseException]] = queue.Queue()

        def join(seat: Seat, expectation: Expectation) -> None:
            try:
                sock = expectation.wait(DEADLINE_S)
                assert sock is not None
                ring = join_ring(
                    sock, seat, capacity or n_nodes, Limits(), codec_in=expectation.codec,
                    listener=self.listeners[seat.index], caller=expectation.caller,
                )  # fmt: skip
                joined.put((seat.index, ring))
            except BaseException as e:  # handed to the thread that waits
                joined.put((seat.index, e))

        expectations = [
            one.expect(self.epoch, seat.prev_hello)
            for one, seat in zip(self.listeners[1:], self.seats[1:], strict=True)
        ]
        threads = [
            threading.Thread(target=join, args=(seat, expectation), name=seat.name)
            for seat, expectation in zip(self.seats[1:], expectations, strict=True)
        ]
        for thread in threads:
            thread.start()
        first = close_starter_ring(self.listeners[0], self.seats[0], capacity or n_nodes, Limits())
        found = dict(joined.get(timeout=DEADLINE_S) for _ in threads)
        for thread in threads:
            thread.join(DEADLINE_S)
        for one in found.values():
            if isinstance(one, BaseException):
                raise one
        self.rings = [first, *(found[i] for i in range(1, n_nodes))]  # type: ignore[list-item]

    def kill(self, index: int) -> None:
        """What becomes of a process that was killed: it says nothing any more, and the kernel closes its sockets."""
        ring = self.rings[index]
        self.listeners[index].close()
        ring.end_with(None)
        for link in (ring.previous_link, ring.next_link):
            link.close()

    def reset(self, index: int) -> None:
        """The connection from node `index` to the next one breaks; both live."""
        self.rings[index].next_link.interrupt()

    def close(self) -> None:
        for ring in self.rings:
            ring.stop("the test is over")
        for ring in self.rings:
            ring.close()
        for one in self.listeners:
            one.close()  # harmless if repeated


@contextlib.contextmanager
def nodes(n_nodes: int, **kwargs: Any) -> Iterator[Nodes]:
    ring = Nodes(n_nodes, **kwargs)
    try:
        yield ring
    finally:
        ring.close()


class Text:
    """What the events say about one sequence, as far as they have come."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self._reason: str | None = None
        self._n_events = 0

    @property
    def ids(self) -> list[int]:
        self._take_all()
        return self._ids

    @property
    def reason(self) -> str | None:
        self._take_all()
        return self._reason

    @property
    def n_events(self) -> int:
        self._take_all()
        return self._n_events

    def wait(self) -> None:
        """Until the last event is there."""
        while self._reason is None:
            self._take(self.request.events.get(timeout=DEADLINE_S))

    def cancel(self, reason: str = "cancelled") -> None:
        self.request.cancel(reason)

    def _take_all(self) -> None:
        while not self.request.events.empty():
            self._take(self.request.events.get_nowait())

    def _take(self, event: Event) -> None:
        assert self._reason is None, "an event after the last one"
        self._n_events += 1
        self._ids.extend(event.tokens)
        self.logprobs.extend(event.logprobs)
        self._reason = event.finish_reason


class InProcessRing:
    """A starter engine and its secondaries, each secondary's loop in a thread of its own."""

    def __init__(
        self,
        gpt: GPT,
        n_nodes: int,
        cuts: tuple[int, ...] | None = None,
        max_length: int = CONTEXT,
        chunk_rows: int = CHUNK_ROWS,
        memory: CacheMemory | None = None,
        decode_rows: int = DECODE_ROWS,
        n_frames: int | None = None,
        wire: str = "auto",
        kv_dtype: torch.dtype = torch.float32,
        files: Sequence[KeptFiles] = (),
        seed: str = "",
        owner_folder: Callable[[str], str] = str,
        owners: Sequence[str] = (),
        stages: Sequence[Any] | None = None,
        rows: Any = None,  # as these stages have them; None: as tensors
        hot: Collection[int] = (),  # of nodes whose next one has the same blocks, in `stages`
    ) -> None:
        self._hot, self._rows = hot, rows or TensorRows(CPU, torch.float32)
        cuts = even_cuts(gpt.config.n_layer, n_nodes) if cuts is None else cuts
        self.wire = wire
        self.stages: list[Any] = [*(stages or stages_of(gpt, cuts, max_length=max_length, kv_dtype=kv_dtype))]
        self.tasks: queue.SimpleQueue[PrefixTask] = queue.SimpleQueue()  # that came back to the starter
        self._files = files
        self.nodes = Nodes(n_nodes, capacity=n_frames) if n_nodes > 1 else None
        self.ring = self.nodes.rings[0] if self.nodes else LoopbackRing(n_frames or 1)
        self.endings: dict[int, BaseException | None] = {}
        self._threads = [
            threading.Thread(target=self._secondary, args=(i,), name=f"secondary{i - 1}") for i in range(1, n_nodes)
        ]
        for thread in self._threads:
            thread.start()
        starter = self.stages[0]
        if self.nodes:
            self.ring = self.seen(0)
        scheduler = Scheduler(chunk_rows=chunk_rows, memory=memory, decode_rows=decode_rows)
        at_starter = getattr(starter, "at_starter", starter)
        self.engine = StarterEngine(at_starter, scheduler, max_length, self._rows, wire)
        if files:
            self.engine.prefixes = RingPrefixes(
                lambda task: files[0].answer(task, starter.caches), seed, 2, owner_folder, owners
            )
            answered, tasks = scheduler.answered, self.tasks

            def note(number: int, task: PrefixTask, took_s: float = 0.0) -> None:
                answered(number, task, took_s)
                tasks.put(task)

            scheduler.answered = note  # type: ignore[method-assign]

    def seen(self, index: int) -> Any:
        """The ring as the loop of a node sees it."""
        assert self.nodes is not None
        return self.nodes.rings[index]

    def submit(self, prompt_ids: list[int], params: SamplingParams, then: Callable[[], object] | None = None) -> Text:
        """`then` is called by the engine's thread for each token; True ends the text."""
        ends = None if then is None else lambda _: then() is True
        return Text(self.engine.submit(prompt_ids, params, ends))

    def run(self) -> None:
        self.engine.run(self.ring)

    def keep(self) -> None:
        """Be idle until the end of a text, and all before it, is on the disks."""
        thread = threading.Thread(target=self.engine.run, args=(self.ring, False))
        thread.start()
        while (task := self.tasks.get(timeout=DEADLINE_S)).kind != KEEP or not task.is_end:
            pass
        self.engine.leave(self.ring.epoch)
        thread.join(DEADLINE_S)
        assert not thread.is_alive() and task.is_done
        self.engine.leave(-1)
        assert all([one.flush(DEADLINE_S) for one in self._files])

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Text]:
        texts = [self.submit(p, params) for p in prompts]
        self.run()
        return texts

    def caches(self) -> list[int]:
        """Sequences that each node holds a cache of."""
        return [len(stage.caches) for stage in self.stages]

    def close(self) -> None:
        self.ring.stop("the test is over")
        self.join()
        if self.nodes:
            self.nodes.close()

    def join(self) -> None:
        """Wait until every secondary has left its loop."""
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), f"{thread.name} hangs"

    def _secondary(self, index: int) -> None:
        assert self.nodes is not None
        ring, seat = self.nodes.rings[index], self.nodes.seats[index]
        is_last = index == seat.n_nodes - 1
        stage = self.stages[index]
        answer = (lambda task: self._files[index].answer(task, stage.caches)) if self._files else None
        is_hot = index in self._hot
        loop = SecondaryLoop(stage, self._rows, self.seen(index), is_last, self.wire, answer=answer, is_hot=is_hot)
        self.endings[index] = None
        try:
            loop.run()
        except Exception as e:
            self.endings[index] = e
            if not ring.wait_end(0):
                ring.fail(Fault(seat.name, f"it failed: {e}", seat.name))


@contextlib.contextmanager
def ring_of(gpt: GPT, n_nodes: int, **kwargs: object) -> Iterator[InProcessRing]:
    ring = InProcessRing(gpt, n_nodes, **kwargs)  # type: ignore[arg-type]
    try:
        yield ring
    finally:
        ring.close()
