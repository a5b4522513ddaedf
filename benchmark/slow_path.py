# SPDX-License-Identifier: Apache-2.0
"""Ports of one loopback address that lead to the same ports of another one, at a bounded rate.

For experiments on what happens while bytes are under way: on one machine they are there at once. A thread of its own
carries them. A connection ends on both sides as soon as one of them ends it. Something can be made to happen when so
many bytes have come.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

CHUNK_BYTES = 64 << 10
HELD_BYTES = 256 << 10
"""What one end has sent and the path has not carried yet. Left to the kernel it is megabytes, which come even when
their sender is gone; the kernel takes twice what it is told."""

MOST_LATE_S = 0.01
"""What was not carried for longer than this is not made up for."""


class Alarm:
    """Calls ``action`` on a thread of its own when ``num_bytes`` have come, unless it is called off before."""

    def __init__(self, num_bytes: float, action: Callable[[], None]) -> None:
        self._left_bytes = num_bytes
        self._action = action
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1)
        self._ringing: Future[None] | None = None

    def came(self, num_bytes: int) -> None:
        with self._lock:
            self._left_bytes -= num_bytes
            if self._left_bytes <= 0 and self._ringing is None:
                self._ringing = self._thread.submit(self._action)

    def settle(self) -> bool:
        """Whether the action was called; it is over then, and is not called later. Raises what it has raised."""
        with self._lock:
            self._left_bytes = math.inf
        self._thread.shutdown()
        if self._ringing is None:
            return False
        self._ringing.result()
        return True


class SlowPath:
    """From ``here`` to ``there``, both host addresses, on these ``ports``; ``rate`` in bytes a second and direction, of
    each connection. Use it as a context manager."""

    def __init__(self, here: str, there: str, ports: Iterable[int], *, rate: float) -> None:
        self._here, self._there, self._ports, self._rate = here, there, list(ports), rate
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._alarm: Alarm | None = None
        self.num_bytes = 0
        """That have come from ``there``."""

    def at(self, num_bytes: float, action: Callable[[], None]) -> Alarm:
        """Call ``action`` when so many more bytes have come from ``there``; instead of what was to be called before."""
        self._alarm = Alarm(num_bytes, action)
        return self._alarm

    def __enter__(self) -> SlowPath:
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        for port in self._ports:

            async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port) -> None:
                await self._carry(reader, writer, port)

            await asyncio.start_server(carry, self._here, port)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        far_end = socket.socket()
        far_end.setblocking(False)
        far_end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HELD_BYTES // 2)
        try:
            await asyncio.get_running_loop().sock_connect(far_end, (self._there, port))
        except OSError:
            far_end.close()
            writer.close()
            return
        far_reader, far_writer = await asyncio.open_connection(sock=far_end)
        ways = [
            asyncio.ensure_future(self._copy(reader, far_writer, lambda num_bytes: None)),
            asyncio.ensure_future(self._copy(far_reader, writer, self._came)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, far_writer):
                end.close()

    def _came(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self._alarm is not None:
            self._alarm.came(num_bytes)

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, copied: Callable[[int], None]
    ) -> None:
        clock = asyncio.get_running_loop().time
        free_s = clock()
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(CHUNK_BYTES):
                writer.write(chunk)
                await writer.drain()
                copied(len(chunk))
                # From when the path was free: what a sleep lasts too long is not added up.
                free_s = max(free_s, clock() - MOST_LATE_S) + len(chunk) / self._rate
                await asyncio.sleep(free_s - clock())


async def _cancel_others() -> None:
    mine = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not mine]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
