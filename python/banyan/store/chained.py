# SPDX-License-Identifier: Apache-2.0
"""A page store on top of any table of values.

Invariants
  1. A value is a page and behind it a digest of namespace, key and page; a page is returned only when they agree.
  2. A page is stored only behind its parent, and evicted only after its children.
  3. One worker thread touches the table. Frames are its own from ``put`` to ``completed``, and from ``read`` to its
     end.

A page: queued -> stored or failed. Which pages are stored is known to the writer; the pages of others are asked for
in the table.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from banyan.ports import Frames

DIGEST_BYTES = 16


class Values(Protocol):
    """A table from names to bytes. Called by one thread. An OSError is a failed operation, never a crash."""

    def put(self, name: str, value: Sequence[memoryview]) -> None:
        """Keep the concatenation of ``value`` under ``name``."""
        ...

    def get(self, name: str, num_bytes: int) -> bytes | None:
        """The value, or None when it is not there."""
        ...

    def exists(self, names: Sequence[str]) -> list[bool]: ...

    def remove(self, name: str) -> None:
        """Harmless when it is not there."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FoundPages:
    num_pages: int
    keys: tuple[str, ...]
    namespace: bytes


@dataclass(slots=True)
class PagesRead:
    """See ``ports.StoreRead``."""

    bytes_read: int = 0
    read_s: float = 0.0
    is_late: bool = False
    failed: list[tuple[int, str]] = field(default_factory=list)
    work: Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        return self.work is not None and self.work.done()

    def finish(self) -> list[tuple[int, str]]:
        assert self.work is not None
        self.work.result()
        return self.failed


@dataclass(frozen=True, slots=True)
class _Queued:
    key: str
    parent: str | None
    frame: memoryview


class ChainedStore:
    """See ``ports.PageStore``. Any thread."""

    def __init__(self, values: Values, namespace: bytes, frame_bytes: int, *, max_queued: int = 1024) -> None:
        self._values = values
        self._namespace = namespace
        self._frame_bytes = frame_bytes
        self._max_queued = max_queued
        self._budget_bytes: int | None = None
        self._queue: deque[_Queued] = deque()
        self._queued_keys: set[str] = set()
        self._parents: OrderedDict[str, str | None] = OrderedDict()
        self._completed: list[tuple[str, str]] = []
        self._num_failed = 0
        self._lock = threading.RLock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="banyan-store")

    def register(self, memory: Any) -> None:
        """Values are copied: no memory has to be prepared."""

    # ---- up ----------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[str]) -> FoundPages:
        """The longest run of leading pages. What this writer stored is known; of the rest the table is asked."""
        with self._lock:
            namespace = self._namespace
            known = 0
            while known < len(keys) and keys[known] in self._parents:
                known += 1
            for key in reversed(keys[:known]):
                self._parents.move_to_end(key)
        rest = list(keys[known:])
        there = self._worker.submit(self._values.exists, [self._name(key) for key in rest]).result() if rest else []
        run = next((position for position, exists in enumerate(there) if not exists), len(there))
        return FoundPages(known + run, tuple(keys[: known + run]), namespace)

    def read(self, found: FoundPages, num_pages: int, memory: Any, offsets: Frames) -> PagesRead:
        """Start to read; page ``i`` goes to byte ``offsets[i]`` of ``memory``."""
        places = memoryview(offsets).tolist()
        if num_pages > found.num_pages or num_pages != len(places):
            raise ValueError(f"{num_pages} pages to read, {found.num_pages} found, {len(places)} frames")
        frames = [self._frame(memory, place) for place in places]
        read = PagesRead()
        read.work = self._worker.submit(self._fetch, read, found, frames)
        return read

    def _fetch(self, read: PagesRead, found: FoundPages, frames: list[memoryview]) -> None:
        start = time.perf_counter()
        for position, (key, frame) in enumerate(zip(found.keys, frames, strict=False)):
            reason = self._fetch_page(key, found.namespace, frame)
            if reason is None:
                read.bytes_read += len(frame)
                continue
            read.failed.append((position, reason))
            with self._lock:
                self._parents.pop(key, None)
        read.read_s = time.perf_counter() - start

    def _fetch_page(self, key: str, namespace: bytes, frame: memoryview) -> str | None:
        """None when the frame holds the page now; else why not."""
        if namespace != self._namespace:
            return "gone"
        name = self._name(key)
        try:
            value = self._values.get(name, self._frame_bytes + DIGEST_BYTES)
        except OSError:
            return "io"
        if value is None:
            return "gone"
        page = memoryview(value)[: self._frame_bytes]
        if value[self._frame_bytes :] != self._digest(key, page):
            self._values.remove(name)
            return "checksum"
        frame[:] = page
        return None

    # ---- down --------------------------------------------------------------------------------------------------

    def put(self, keys: Sequence[str], parent: str | None, memory: Any, offsets: Frames) -> list[str]:
        """Queue a chain; the words are those of the native store."""
        places = memoryview(offsets).tolist()
        if len(keys) != len(places):
            raise ValueError(f"{len(keys)} keys but {len(places)} frames")
        verdicts = []
        with self._lock:
            for key, place in zip(keys, places, strict=True):
                verdict = self._judge(key, parent)
                if verdict == "queued":
                    self._queue.append(_Queued(key, parent, self._frame(memory, place)))
                    self._queued_keys.add(key)
                verdicts.append(verdict)
                parent = key
        self._worker.submit(self._write)
        return verdicts

    def _judge(self, key: str, parent: str | None) -> str:
        if key in self._parents or key in self._queued_keys:
            return "present"
        if parent is not None and parent not in self._parents and parent not in self._queued_keys:
            return "orphan"
        return "full" if len(self._queue) >= self._max_queued else "queued"

    def _write(self) -> None:
        """Worker: write what the budget allows."""
        while True:
            with self._lock:
                allowed = self._budget_bytes is None or self._budget_bytes >= self._frame_bytes
                if not self._queue or not allowed:
                    return
                if self._budget_bytes is not None:
                    self._budget_bytes -= self._frame_bytes
                page = self._queue.popleft()
            self._settle(page, self._store(page))

    def _store(self, page: _Queued) -> str:
        with self._lock:
            if page.parent is not None and page.parent not in self._parents:
                return "failed"
        try:
            self._values.put(self._name(page.key), [page.frame, memoryview(self._digest(page.key, page.frame))])
        except OSError:
            return "failed"
        return "stored"

    def _settle(self, page: _Queued, outcome: str) -> None:
        with self._lock:
            self._queued_keys.discard(page.key)
            self._num_failed += outcome == "failed"
            if outcome == "stored":
                self._parents[page.key] = page.parent
            self._completed.append((page.key, outcome))

    def completed(self) -> list[tuple[str, str]]:
        with self._lock:
            completed, self._completed = self._completed, []
            return completed

    def sync(self) -> int:
        """Write out the queue regardless of the budget; how many pages failed."""
        with self._lock:
            before, budget, self._budget_bytes = self._num_failed, self._budget_bytes, None
        self._worker.submit(self._write).result()
        with self._lock:
            self._budget_bytes = budget
            return self._num_failed - before

    def pause_writes(self) -> None:
        self.set_write_budget(0)

    def open_writes(self) -> None:
        with self._lock:
            self._budget_bytes = None
        self._worker.submit(self._write)

    def set_write_budget(self, num_bytes: int) -> None:
        with self._lock:
            self._budget_bytes = num_bytes
        self._worker.submit(self._write)

    # ---- what is kept ------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> int:
        """Remove the least recently used of this writer's pages, children before parents."""
        gone = []
        with self._lock:
            needed = set(self._parents.values()) | {page.parent for page in self._queue}
            for _ in range(num_pages):
                key = next((key for key in self._parents if key not in needed), None)
                if key is None:
                    break
                del self._parents[key]
                needed = set(self._parents.values()) | {page.parent for page in self._queue}
                gone.append(key)
        for key in gone:
            self._worker.submit(self._values.remove, self._name(key)).result()
        return len(gone)

    def invalidate(self, namespace: bytes) -> None:
        """Go on in another namespace."""
        with self._lock:
            self._namespace = namespace
            self._parents.clear()
            lost = list(self._queue)
            self._queue.clear()
            for page in lost:
                self._settle(page, "failed")
        self._worker.submit(lambda: None).result()

    def close(self) -> None:
        """Finish what is being written, fail the rest, and leave. Idempotent."""
        with self._lock:
            lost = list(self._queue)
            self._queue.clear()
            for page in lost:
                self._settle(page, "failed")
        self._worker.shutdown()
        self._values.close()

    def _frame(self, memory: Any, place: int) -> memoryview:
        whole = memoryview(memory)
        if place < 0 or place + self._frame_bytes > len(whole):
            raise ValueError(f"a frame at byte {place} does not fit into {len(whole)} bytes")
        return whole[place : place + self._frame_bytes]

    def _name(self, key: str) -> str:
        return f"banyan/{self._namespace.hex()[:32]}/{key}"

    def _digest(self, key: str, page: memoryview) -> bytes:
        digest = hashlib.blake2b(key.encode() + self._namespace, digest_size=DIGEST_BYTES)
        digest.update(page)
        return digest.digest()
