"""Links that break on request: each node is called at an address where we listen, and what comes is passed on to the node.

The nodes know nothing of it: the nodes file names the front addresses (127.0.0.2), and `bind` the true ones (127.0.0.1), with
the same ports. So a test breaks a link from outside, at the byte that it wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from mdi.net.wire import FrameType

FRONT, BACK = "127.0.0.2", "127.0.0.1"
DEADLINE_S = 60.0
TYPE_BYTE = 5  # of a frame: its type
CHUNK = 1 << 16

T = TypeVar("T")


@dataclass
class Pace:
    """How slow a link is: `delay_s` one way, `bytes_per_s` in each direction; 0 is no limit."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0


class FaultyLink:
    """The way into one port of a node. Its methods may be called from any thread.

    Attributes:
        n_bytes: that have passed towards the node.
        n_connections: that were made.
        n_rings: those of them that began with a HELLO, the frame of a ring's link, and not with a message.
    """

    def __init__(self, network: Network, port: int, pace: Pace) -> None:
        self._network = network
        self.port = port
        self._pace = pace
        self._server: asyncio.Server | None = None
        self._open: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._passing = asyncio.Event()
        self._left: int | None = None  # bytes until the connection is cut
        self._busy_until = [0.0, 0.0]
        self.n_bytes = 0
        self.n_connections = 0
        self.n_rings = 0

    def reset(self) -> None:
        """Break all connections by force: both sides see a reset."""
        self._network.call(self._reset)

    def cut_after(self, n_bytes: int) -> None:
        """Break the connection when so many more bytes have gone to the node: in the middle of a frame, most likely."""
        self._network.call(lambda: setattr(self, "_left", n_bytes))

    def freeze(self) -> None:
        """Nothing passes any more, and nobody is told: as behind a cable that was pulled."""
        self._network.call(self._passing.clear)

    def thaw(self) -> None:
        """What was held back passes, and nothing is cut any more."""
        self._network.call(self._thaw)

    # In the network's thread

    async def start(self) -> None:
        self._passing.set()
        self._server = await asyncio.start_server(self._accept, FRONT, self.port)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self._reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _thaw(self) -> None:
        self._left = None
        self._passing.set()

    def _reset(self) -> None:
        self._left = None
        for pair in list(self._open):
            self._break(pair)

    def _break(self, pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self._open.discard(pair)
        for writer in pair:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):  # it was closed already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _accept(self, front_reader: asyncio.StreamReader, front: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        try:
            back_reader, back = await asyncio.open_connection(BACK, self.port)
        except OSError:  # the node is gone: its port says so
            sock = front.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            front.transport.abort()
            return
        pair = front, back
        self._open.add(pair)
        tasks = [
            asyncio.create_task(self._carry(front_reader, back, pair, 0)),
            asyncio.create_task(self._carry(back_reader, front, pair, 1)),
        ]
        self._tasks.update(tasks)
        try:
            await asyncio.gather(*tasks)
        finally:
            self._tasks.difference_update(tasks)
            self._break(pair)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter], way: int,
    ) -> None:  # fmt: skip
        """From one socket to the other, `way` 0 towards the node; an end is passed on, a break breaks both."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        sending = asyncio.create_task(self._deliver(queue, writer, pair, way))
        try:
            is_first = way == 0
            while data := await reader.read(CHUNK):
                self.n_rings += is_first and data[TYPE_BYTE : TYPE_BYTE + 1] == bytes([FrameType.HELLO])
                is_first = False
                await queue.put((self._due(len(data), way), data))
            await queue.put((self._due(0, way), b""))
            await sending
        except OSError:
            self._break(pair)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _deliver(
        self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter,
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter], way: int,
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        try:
            while True:
                due, data = await queue.get()
                if due > loop.time():
                    await asyncio.sleep(due - loop.time())
                await self._passing.wait()
                if not data:
                    writer.write_eof()
                    return
                if way == 0:
                    data, is_cut = self._counted(data)
                    writer.write(data)
                    await writer.drain()
                    if is_cut:
                        return self._break(pair)
                else:
                    writer.write(data)
                    await writer.drain()
        except (OSError, RuntimeError):  # closed meanwhile
            self._break(pair)

    def _counted(self, data: bytes) -> tuple[bytes, bool]:
        """What of it passes, and whether the connection is to be cut behind it."""
        is_cut = self._left is not None and len(data) >= self._left
        if is_cut:
            data, self._left = data[: self._left], None
        elif self._left is not None:
            self._left -= len(data)
        self.n_bytes += len(data)
        return data, is_cut

    def _due(self, n_bytes: int, way: int) -> float:
        """When so many bytes have come out at the other end."""
        now = asyncio.get_running_loop().time()
        if self._pace.bytes_per_s:
            self._busy_until[way] = max(now, self._busy_until[way]) + n_bytes / self._pace.bytes_per_s
        return max(now, self._busy_until[way]) + self._pace.delay_s


class Network:
    """All faulty links of a ring, in one thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-links", daemon=True)
        self._thread.start()
        self.links: list[FaultyLink] = []

    def link(self, port: int, pace: Pace | None = None) -> FaultyLink:
        """Listen on FRONT:port for the node that listens on BACK:port."""
        link = self.call(lambda: FaultyLink(self, port, pace or Pace()))
        asyncio.run_coroutine_threadsafe(link.start(), self._loop).result(DEADLINE_S)
        self.links.append(link)
        return link

    def call(self, function: Callable[[], T]) -> T:
        """Do something in the network's thread."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as e:
                done.set_exception(e)

        self._loop.call_soon_threadsafe(run)
        return done.result(DEADLINE_S)

    def close(self) -> None:
        for link in self.links:
            asyncio.run_coroutine_threadsafe(link.stop(), self._loop).result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()
