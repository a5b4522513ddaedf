# SPDX-License-Identifier: Apache-2.0
"""``ports.PageStore`` over a store that keeps values by name and has to be asked what it holds.

Invariants
  1. The scheduler's thread calls the public methods; none but ``sync``, ``invalidate``, ``clear`` and
     ``close`` waits for the library. Questions, reads and writes are other threads', and the number of each is bounded.
  2. A name says namespace and page key, so nothing of another model, layout or shard is ever asked for.
  3. A page that failed is not expected again for a while, and is removed where it was there and wrong.

What the store holds is known from its answers (``ask``, ``answers``) and from what was written here; ``lookup`` looks
at that only.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from time import monotonic

from banyan._native import Feed, Read, SharedBytes
from banyan.features.stores.asked_values import AskedValues, KeyedFound, name_of
from banyan.features.stores.evictions import Evictions
from banyan.features.stores.presence_cache import MAX_PRESENT, PresenceCache
from banyan.features.stores.rate_limited_log import RateLimitedLog
from banyan.features.stores.value_format import HeaderBuffer, ValueFormat, address_of
from banyan.features.stores.value_reads import PageRead, PageReader, ReadPace
from banyan.features.stores.values import Iovec, Values
from banyan.features.stores.watch import Watch
from banyan.features.stores.writes import BATCH, FAILED, PRESENT, STORED, Waiting, Writes
from banyan.latest import Latest
from banyan.ports import Frames
from banyan.telemetry.workers import Workers

NUM_READERS = 2
HEADERS_AT_ONCE = 256
MAX_READS = 256
BACKLOG_BYTES = 256 << 20
STALL_S = 10.0
LEAVE_S = 10.0
"""So long a library that does not answer is waited for in the end."""
COUNTED = (
    "written_pages",
    "written_bytes",
    "write_failures",
    "write_errors",
    "put_full",
    "checksum_failures",
    "read_errors",
    "sync_timeouts",
)


class KeyedStore:
    """One writer's. Owns ``values``."""

    def __init__(
        self,
        values: Values,
        *,
        namespace: bytes,
        layer_bytes: Sequence[int],
        read_bytes_per_s: int | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self._values = values
        self._value_format = ValueFormat(tuple(layer_bytes))
        self._lock = threading.Lock()
        self._presence = PresenceCache(namespace, monotonic)
        self._own: Latest[str, None] = Latest(MAX_PRESENT)
        self._bases: dict[int, tuple[SharedBytes, int]] = {}
        self._completed: deque[tuple[str, str]] = deque()
        self._counts: Counter[str] = Counter()
        self._log = RateLimitedLog(values.engine)
        self._has_ended = False
        self._stall_s = stall_s
        self._watch = Watch(stall_s)
        self._num_stalls = 0
        self._is_late = False
        self._evictions = Evictions(values, stall_s)
        self._asked = AskedValues(values, self._presence, lambda error: self._failed("read_errors", error))
        self._workers = Workers(NUM_READERS, name="banyan-store-read", feature="a read from the store")
        self._readers: SimpleQueue[PageReader] = SimpleQueue()
        pace = ReadPace(read_bytes_per_s)
        for _ in range(NUM_READERS):
            header_buffer, moved = self._header_buffer(HEADERS_AT_ONCE), self._watch.moves
            self._readers.put(PageReader(values, self._value_format, header_buffer, pace=pace, moved=moved))
        self._writes = Writes(
            values,
            self._value_format,
            self._header_buffer(BATCH),
            backlog_bytes=BACKLOG_BYTES,
            num_reads=lambda: self._watch.num_reads,
            done=self._wrote,
            lost=lambda error: self._failed("write_errors", error),
        )

    def _header_buffer(self, num_headers: int) -> HeaderBuffer:
        header_buffer = HeaderBuffer(self._value_format, num_headers)
        self._values.register(Iovec(header_buffer.address, header_buffer.num_bytes))
        return header_buffer

    @property
    def engine(self) -> str:
        return self._values.engine

    @property
    def value_bytes(self) -> int:
        """What is written of a page."""
        return self._value_format.value_bytes

    def register(self, memory: SharedBytes) -> None:
        if id(memory) not in self._bases:
            self._bases[id(memory)] = (memory, address_of(memory))
            self._values.register(Iovec(self._bases[id(memory)][1], memory.num_bytes))

    def _base(self, memory: SharedBytes) -> int:
        self.register(memory)
        return self._bases[id(memory)][1]

    # ---- what is there -----------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._presence.version

    def lookup(self, keys: Sequence[str], /) -> KeyedFound:
        namespace = self._presence.namespace
        num_known = 0 if self._watch.is_stalled else self._presence.num_leading(keys, namespace)
        return KeyedFound(keys[:num_known], namespace)

    def ask(self, keys: Sequence[str]) -> int | None:
        """Ask the store for the leading pages of ``keys``; the number under which `answers` says what it holds. None:
        it is not asked."""
        self._look()
        if self._has_ended or self._watch.is_stalled:
            return None
        return self._asked.ask(keys, self._presence.namespace)

    def answers(self) -> list[tuple[int, KeyedFound | None]]:
        """Questions that are over since the last call. Never waits."""
        return self._asked.answers()

    # ---- up ----------------------------------------------------------------------------------------------------

    def read(
        self, found: KeyedFound, num_pages: int, memory: SharedBytes, offsets: Frames, *, layers_per_step: int = 1
    ) -> Read:
        """Start to read; with more reads under way than it keeps in mind, all pages fail at once."""
        feed = Feed(memory, offsets, self._value_format.page_bytes, self._value_format.num_layers)
        read, base, places = feed.read(), self._base(memory), _numbers(offsets)
        if self._has_ended or not self._watch.asked(feed, MAX_READS):
            _end_at_once(feed)
            return read
        keys, namespace, presence = list(found.keys[:num_pages]), found.namespace, self._presence
        wanted = PageRead(
            namespace, keys, memory, base, places, layers_per_step, feed, lambda: namespace == presence.namespace
        )
        try:
            self._workers.submit(partial(self._carry, wanted))
        except RuntimeError as error:
            # There is no thread to be had.
            if self._watch.begins(feed):
                _end_at_once(feed)
                self._watch.ended(feed)
            self._failed("read_errors", error)
        return read

    def _carry(self, read: PageRead) -> None:
        if not self._watch.begins(read.feed):
            return
        reader = self._readers.get()
        try:
            reader.carry(read, [name_of(read.namespace, key) for key in read.keys])
        except Exception as error:  # noqa: BLE001 - whatever a library raises costs hits, and nothing else
            read.failed |= dict.fromkeys(set(range(len(read.keys))) - read.failed.keys(), False)
            self._failed("read_errors", error)
        finally:
            try:
                # Whoever sees the end of the read is to see as well what it has shown.
                if read.failed:
                    self._doubt(read)
            finally:
                read.feed.end()
            self._readers.put(reader)
            self._watch.ended(read.feed)

    def _doubt(self, read: PageRead) -> None:
        self._presence.doubt([read.keys[page] for page in read.failed], read.namespace)
        damaged = [read.keys[page] for page, was_there in read.failed.items() if was_there]
        if damaged:
            self._count("checksum_failures", len(damaged))
            self._log.about(f"{len(damaged)} page(s) did not verify, the first {damaged[0][:16]}")
            try:
                self._values.remove([name_of(read.namespace, key) for key in damaged])
            except Exception as error:  # noqa: BLE001 - whatever a library raises costs hits, and nothing else
                self._failed("read_errors", error)

    # ---- down --------------------------------------------------------------------------------------------------

    def put(self, keys: Sequence[str], parent: str | None, memory: SharedBytes, offsets: Frames) -> list[str]:
        """As ``ports.PageStore`` says; never "orphan": a page is found by its name, whatever comes before it."""
        self._look()
        if self._has_ended or self._watch.is_stalled:
            return ["full"] * len(keys)
        base, places, namespace = self._base(memory), _numbers(offsets), self._presence.namespace
        num_known = self._presence.num_leading(keys, namespace)
        new = [
            Waiting(name_of(namespace, key), key, namespace, memory, base, offset)
            for key, offset in zip(keys[num_known:], places[num_known:], strict=True)
        ]
        answers = self._writes.put(new)
        self._count("put_full", answers.count("full"))
        return [PRESENT] * num_known + answers

    def _wrote(self, pages: Sequence[tuple[Waiting, str]]) -> None:
        outcomes = [outcome for _, outcome in pages]
        self._count("written_pages", outcomes.count(STORED))
        self._count("written_bytes", outcomes.count(STORED) * self.value_bytes)
        self._count("write_failures", outcomes.count(FAILED))
        with self._lock:
            namespace = self._presence.namespace
            # Keys name pages of the present weights: a late one of others would end a page that is still waited for.
            current = [(page.key, outcome) for page, outcome in pages if page.namespace == namespace]
            stored = [key for key, outcome in current if outcome == STORED]
            self._presence.add([key for key, outcome in current if outcome == PRESENT], namespace)
            self._presence.wrote(stored, namespace)
            for key in stored:
                self._own.put(key, None)
            self._completed.extend(current)

    def completed(self) -> list[tuple[str, str]]:
        """As ``ports.PageStore`` says. Stored: others find it. It is not synced to a drive."""
        done = []
        while self._completed:
            done.append(self._completed.popleft())
        return done

    def sync(self, within_s: float | None = None) -> int:
        try:
            return self._writes.flush(self._stall_s, within_s)
        except TimeoutError:
            self._counts["sync_timeouts"] += 1
            raise

    def pause_writes(self) -> None:
        self._writes.pause()

    def open_writes(self) -> None:
        self._writes.open()

    # ---- leave -------------------------------------------------------------------------------------------------

    def clear(self) -> int:
        """Fail what is queued, and remove the pages that this process has written, as far as it remembers them. Others
        may do the same just now: what they hold has to be asked again.

        Raises:
            OSError: when the library refuses, or has not answered in time.
        """
        has_ended = self._writes.drop(LEAVE_S)
        with self._lock:
            # The latest first.
            keys = list(reversed(self._own))
            self._own.clear()
        self._presence.clear()
        names = [name_of(self._presence.namespace, key) for key in keys]
        try:
            num_removed = self._evictions.remove(names) if names else 0
        except OSError:
            # The next one has them to remove.
            with self._lock:
                self._own.update(dict.fromkeys(reversed(keys)))
            raise
        if not has_ended:
            raise TimeoutError("the store still writes pages: they are removed when it is done")
        return num_removed

    def invalidate(self, namespace: bytes) -> None:
        with self._lock:
            self._presence.begin(namespace)
            self._own.clear()
            self._completed.clear()
        self._writes.drop(LEAVE_S)

    def stats(self) -> dict[str, int]:
        return {
            **{name: self._counts[name] for name in COUNTED},
            **self._values.stats(),
            "writing_us": self._writes.writing_us,
            "backlog_pages": self._writes.num_waiting,
            "known_pages": len(self._presence),
            "stalls": self._watch.num_stalls + self._num_stalls,
            "is_stopped": int(self._writes.has_ended or self._watch.is_off),
        }

    def close(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        deadline_s = monotonic() + LEAVE_S
        self._writes.close(LEAVE_S)
        self._asked.close(max(0.0, deadline_s - monotonic()))
        self._workers.close(0.0 if self._watch.is_stalled else max(0.0, deadline_s - monotonic()))
        self._watch.close()
        self._values.close()

    def _count(self, name: str, number: int) -> None:
        with self._lock:
            self._counts[name] += number

    def _look(self) -> None:
        """Whether a question or a write is late, which nobody waits for: a stall, as a read that is late."""
        was_late = self._is_late
        self._is_late = monotonic() - min(self._asked.since_s, self._writes.since_s) > self._stall_s
        if self._is_late and not was_late:
            self._num_stalls += 1
            self._log.about(f"no answer to a question or a write for {self._stall_s:g} s")

    def _failed(self, name: str, error: Exception) -> None:
        self._count(name, 1)
        self._log.about(error)


def _end_at_once(feed: Feed) -> None:
    """Nothing of it comes. A read that is late is promised to nobody; one that has ended may have brought its pages."""
    feed.be_late()
    feed.end()


def _numbers(offsets: Frames) -> list[int]:
    """Of a buffer of int64."""
    return memoryview(offsets).cast("B").cast("q").tolist()
