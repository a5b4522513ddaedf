# SPDX-License-Identifier: Apache-2.0
"""What may bring a prefix from one server to another: the page server, over TCP and by NIXL, a Mooncake store, a folder
that both have mounted.

Each has two servers of one rank and one compute thread: the writer computes prompts, the reader is asked them
afterwards. Both have an arena as large as the other carriers' servers have.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmark.engine import Engine
from benchmark.measure import flush_cache
from benchmark.mooncake import Mooncake
from benchmark.processes import ProcessSession
from benchmark.remote_link import NIXL_ENV
from benchmark.remote_nodes import FLAGS, HOST, PATIENCE_S, is_heard
from benchmark.servers import Server, ServerSpec, cpu_env, free_port, wait_ready, write_secret
from benchmark.warm import ForkedServer

PAGE_TOKENS = 16
WARM_UP = range(1000, 1400)
POLL_S = 0.02
"""Between two looks at whether a prompt is to be had: how finely the time until then is known."""

LENT_BYTES = 1 << 30
TTL_S = 3600
"""Mooncake's processes sleep with their servers, and are not to be forgotten."""

ARENA = ("--banyan-host-gb", "0.5")
"""Of each of the eight servers, which are up at once; what one turn moves is a third of it."""
FIRST = ("--banyan-store-admit", "first", "--banyan-store-gb", "8")


@dataclass(frozen=True)
class Taken:
    """What one page takes, in bytes, beside the arena's own copy."""

    memory_bytes: float = 0.0
    disk_bytes: float = 0.0


class Carrier(Protocol):
    """``source``: how the reader counts what comes by it; ``counter``: the writer's, of pages that can be had."""

    name: str
    source: str
    counter: str

    def writer_flags(self) -> Sequence[str]: ...
    def reader_flags(self) -> Sequence[str]: ...
    def env(self) -> Sequence[tuple[str, str]]:
        """Of both servers."""

    def sessions(self) -> Sequence[ProcessSession]:
        """Processes beside the servers."""

    def is_settled(self, pair: Pair) -> bool:
        """Whether the servers have found each other, after a start or a sleep."""

    def taken(self, pair: Pair) -> Taken: ...
    def holders(self) -> Mapping[str, Callable[[], None]]:
        """Who holds the bytes beside the servers, and what kills him."""

    def close(self) -> None: ...


class PageServer:
    """The reader borrows from the writer's arena."""

    name, source, counter = "page_server", "remote", "backed_up_pages"

    def __init__(self, folder: Path) -> None:
        self._address = f"{HOST}:{free_port()}"
        self._secret = ("--banyan-secret-file", str(write_secret(folder / "secret")))

    def writer_flags(self) -> Sequence[str]:
        return (*self._secret, "--banyan-listen", self._address)

    def reader_flags(self) -> Sequence[str]:
        return (*self._secret, "--banyan-peers", self._address)

    def env(self) -> Sequence[tuple[str, str]]:
        return ()

    def sessions(self) -> Sequence[ProcessSession]:
        return ()

    def is_settled(self, pair: Pair) -> bool:
        return is_heard(pair.reader, pair.writer)

    def taken(self, pair: Pair) -> Taken:
        return Taken()

    def holders(self) -> Mapping[str, Callable[[], None]]:
        return {}

    def close(self) -> None:
        pass


class PageServerByNixl(PageServer):
    """The same, read by NIXL. Over TCP, as between nodes without RDMA."""

    name = "page_server_by_nixl"

    def writer_flags(self) -> Sequence[str]:
        return (*super().writer_flags(), "--banyan-carrier", "nixl")

    def reader_flags(self) -> Sequence[str]:
        return (*super().reader_flags(), "--banyan-carrier", "nixl")

    def env(self) -> Sequence[tuple[str, str]]:
        return tuple(NIXL_ENV.items())

    def taken(self, pair: Pair) -> Taken:
        num_by_nixl = pair.reader.ranks()[0]["nodes"]["num_by_nixl"]
        if not num_by_nixl:
            raise RuntimeError("nothing came by NIXL")
        return Taken()


class MooncakeStore:
    """Both servers are clients of a Mooncake store, whose memory a process of its own lends."""

    name, source, counter = "mooncake", "storage", "archived_pages"

    def __init__(self, folder: Path) -> None:
        self._store = Mooncake(folder / "logs", lent_bytes=LENT_BYTES, ttl_s=TTL_S)

    def writer_flags(self) -> Sequence[str]:
        return ("--banyan-store", self._store.url, *FIRST)

    def reader_flags(self) -> Sequence[str]:
        return ("--banyan-store", self._store.url)

    def env(self) -> Sequence[tuple[str, str]]:
        return ()

    def sessions(self) -> Sequence[ProcessSession]:
        return self._store.sessions()

    def is_settled(self, pair: Pair) -> bool:
        return True

    def taken(self, pair: Pair) -> Taken:
        return Taken(memory_bytes=self._store.bytes_per_value())

    def holders(self) -> Mapping[str, Callable[[], None]]:
        return {"lender": self._store.kill_lender}

    def close(self) -> None:
        self._store.close()


class Mount:
    """Both servers keep Banyan's own files in one folder."""

    name, source, counter = "mount", "storage", "archived_pages"

    def __init__(self, folder: Path) -> None:
        self._folder = (folder / "mount").absolute()
        shutil.rmtree(self._folder, ignore_errors=True)

    def writer_flags(self) -> Sequence[str]:
        return ("--banyan-store", str(self._folder), *FIRST)

    def reader_flags(self) -> Sequence[str]:
        return ("--banyan-store", str(self._folder), *FIRST[2:])

    def env(self) -> Sequence[tuple[str, str]]:
        return ()

    def sessions(self) -> Sequence[ProcessSession]:
        return ()

    def is_settled(self, pair: Pair) -> bool:
        return True

    def taken(self, pair: Pair) -> Taken:
        state = pair.writer.ranks()[0]
        return Taken(disk_bytes=state["store"]["written_bytes"] / state["archived_pages"])

    def holders(self) -> Mapping[str, Callable[[], None]]:
        return {}

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


KINDS = {kind.name: kind for kind in (PageServer, PageServerByNixl, MooncakeStore, Mount)}


class Pair:
    """The two servers of a carrier. Asleep once they are up; on the way out what the carrier has beside them goes on
    until it is closed."""

    def __init__(self, carrier: Carrier, model: Path, logs: Path) -> None:
        self.carrier = carrier

        def begin(label: str, core: int, flags: Sequence[str]) -> Server:
            named = f"{carrier.name}-{label}"
            env = (*cpu_env(dp=1, first_core=core), *carrier.env())
            spec = ServerSpec(named, 1, "on", (*FLAGS, *ARENA, *flags), env)
            return ForkedServer(spec, model, logs)

        self._servers = [begin("writer", 0, carrier.writer_flags()), begin("reader", 1, carrier.reader_flags())]
        self.writer, self.reader = (Engine(server.url) for server in self._servers)

    def __enter__(self) -> Pair:
        try:
            wait_ready(self._servers)
            self.until(lambda: self.carrier.is_settled(self), 0.2)
            # The first forwards allocate.
            for engine in (self.writer, self.reader):
                engine.generate(WARM_UP)
        except BaseException:
            self.__exit__()
            raise
        self.asleep()
        return self

    def __exit__(self, *error: object) -> None:
        for session in self.carrier.sessions():
            session.awake()
        for server in self._servers:
            server.stop()

    def asleep(self) -> None:
        for one in (*self._servers, *self.carrier.sessions()):
            one.asleep()

    def awake(self) -> None:
        """With all caches empty, and with timers that have caught up."""
        for one in (*self.carrier.sessions(), *self._servers):
            one.awake()
        time.sleep(0.5)
        self.until(lambda: self.carrier.is_settled(self), 0.2)
        for server in self._servers:
            asyncio.run(flush_cache(server.url))

    def cpu_s(self) -> float:
        """Processor time of all its processes so far."""
        return sum(sum(one.cpu_s().values()) for one in (*self._servers, *self.carrier.sessions()))

    def num_to_be_had(self) -> int:
        """Pages of the writer that the reader could have by now, since the start."""
        return int(self.writer.ranks()[0][self.carrier.counter])

    def kill_writer(self) -> None:
        self._servers[0].kill()

    def until(self, condition: Callable[[], bool], poll_s: float) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the servers of {self.carrier.name} do not come to it")
            time.sleep(poll_s)
