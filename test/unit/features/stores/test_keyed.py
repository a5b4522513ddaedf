# SPDX-License-Identifier: Apache-2.0
"""What a keyed store does when its library misbehaves; the library is one in memory that can be told to."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from banyan._native import SharedBytes
from banyan.features.stores import evictions, keyed
from banyan.features.stores.keyed import NUM_READERS, KeyedStore
from banyan.features.stores.presence_cache import KNOWN_S
from banyan.features.stores.value_format import ValueFormat
from banyan.features.stores.values import Iovec, Transfer, Value

LAYER_BYTES = (4096, 8192)
FRAME_BYTES = sum(LAYER_BYTES)
NUM_FRAMES = 8
STALL_S = 1.0


class InMemory:
    """Implements ``values.Values``."""

    engine = "memory"
    least_bytes = 0

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.is_silent = False
        self.error: Exception = OSError("it does not answer")
        self.is_open = threading.Event()
        self.is_open.set()
        self.num_questions = 0

    def _answer(self) -> None:
        self.is_open.wait()
        if self.is_silent:
            raise self.error

    def register(self, iovec: Iovec) -> None: ...

    def present(self, names: Sequence[str]) -> list[bool]:
        self.num_questions += 1
        self._answer()
        return [name in self.held for name in names]

    def write(self, values: Sequence[Value]) -> list[bool]:
        self._answer()
        for name, parts in values:
            self.held[name] = b"".join(ctypes.string_at(*part) for part in parts)
        return [True] * len(values)

    @contextmanager
    def reading(self, names: Sequence[str]) -> Iterator[InMemory]:
        self._names = names
        yield self

    def load(self, transfers: Sequence[Transfer]) -> list[bool]:
        self._answer()
        come = []
        for transfer in transfers:
            value = self.held.get(self._names[transfer.number], b"")[transfer.start :]
            come.append(len(value) >= transfer.num_bytes)
            for address, num_bytes in transfer.to if come[-1] else ():
                ctypes.memmove(address, value, num_bytes)
                value = value[num_bytes:]
        return come

    def remove(self, names: Sequence[str]) -> int:
        self._answer()
        return sum(self.held.pop(name, None) is not None for name in names)

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


def keys(*numbers: int) -> list[str]:
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in numbers]


def offsets(*frames: int) -> np.ndarray:
    return np.array(frames, dtype=np.int64) * FRAME_BYTES


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def hanging(values: InMemory, call: str, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """A library that hangs in one call: set when it does, and to be set for it to go on."""
    is_asked, goes_on, answer = threading.Event(), threading.Event(), getattr(values, call)

    def hang(asked: Sequence[Any]) -> list[bool]:
        is_asked.set()
        goes_on.wait()
        return answer(asked)

    monkeypatch.setattr(values, call, hang)
    return is_asked, goes_on


@pytest.fixture
def values() -> InMemory:
    return InMemory()


@pytest.fixture
def store(values: InMemory) -> Iterator[KeyedStore]:
    store = KeyedStore(values, namespace=b"n" * 32, layer_bytes=LAYER_BYTES, stall_s=STALL_S)
    yield store
    values.is_open.set()
    store.close()


@pytest.fixture
def memory() -> SharedBytes:
    memory = SharedBytes.create(NUM_FRAMES * FRAME_BYTES, "arena")
    np.frombuffer(memory, dtype=np.uint8)[:] = np.random.default_rng(1).integers(0, 256, NUM_FRAMES * FRAME_BYTES)
    return memory


@pytest.fixture
def stored(store: KeyedStore, memory: SharedBytes) -> KeyedStore:
    """With two pages."""
    store.put(keys(0, 1), None, memory, offsets(0, 1))
    assert store.sync() == 0
    return store


def test_read_when_no_thread_is_to_be_had_then_its_pages_have_failed_and_nobody_waits(
    stored: KeyedStore, memory: SharedBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(work: Any) -> Any:
        raise RuntimeError("can't start new thread")

    found, before = stored.lookup(keys(0, 1)), bytes(memory)
    monkeypatch.setattr(stored._workers, "submit", fails)
    read = stored.read(found, 2, memory, offsets(2, 3))
    assert read.is_late, "no batch is promised its pages"
    assert len(read.finish()) == 2
    assert bytes(memory) == before and stored._watch.num_reads == 0
    monkeypatch.setattr(stored._asked._workers, "submit", fails)
    assert stored.ask(keys(4)) is None
    monkeypatch.undo()
    assert stored.read(found, 2, memory, offsets(2, 3)).finish() == []


def test_pages_when_cleared_then_removed_others_stay_and_what_they_hold_is_asked_again(
    stored: KeyedStore, values: InMemory, memory: SharedBytes
) -> None:
    other = KeyedStore(values, namespace=b"n" * 32, layer_bytes=LAYER_BYTES)
    other.put(keys(2), None, memory, offsets(2))
    other.sync()
    assert stored.ask(keys(0, 1, 2)) is not None
    until(lambda: stored.lookup(keys(0, 1, 2)).num_pages == 3)
    before = stored.version
    assert stored.clear() == 2
    assert len(values.held) == 1, "the other one's"
    assert stored.lookup(keys(2)).num_pages == 0 and stored.version != before, "it may be gone as well"
    other.clear()
    assert not values.held
    other.close()


def test_pages_when_cleared_while_they_wait_or_are_being_written_then_none_is_there(
    store: KeyedStore, values: InMemory, memory: SharedBytes
) -> None:
    values.is_open.clear()
    store.put(keys(0), None, memory, offsets(0))
    until(lambda: values.num_questions == 1)
    store.put(keys(1), None, memory, offsets(1))
    threading.Timer(0.1, values.is_open.set).start()
    assert store.clear() == 1
    assert (store.stats()["write_failures"], store.stats()["write_errors"]) == (1, 0), "it was given up"
    assert not values.held and store.lookup(keys(0)).num_pages == 0
    assert sorted(store.completed()) == sorted([(keys(0)[0], "stored"), (keys(1)[0], "failed")])


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_library_when_it_does_not_answer_then_misses_counts_and_one_line(
    stored: KeyedStore, values: InMemory, memory: SharedBytes, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    values.is_silent, values.error = True, kind("it does not answer")
    with caplog.at_level(logging.WARNING, "banyan"):
        read = stored.read(stored.lookup(keys(0, 1)), 2, memory, offsets(4, 5))
        assert read.finish() == [(0, "gone"), (1, "gone")]
        stored.put(keys(2), None, memory, offsets(2))
        assert stored.sync() == 1
    assert stored.lookup(keys(0)).num_pages == 0
    assert stored.completed()[-1] == (keys(2)[0], "failed")
    counts = stored.stats()
    assert (counts["read_errors"], counts["write_failures"], counts["write_errors"]) == (1, 1, 1)
    assert len(caplog.records) == 1 and "it does not answer" in caplog.text


def test_library_when_it_does_not_answer_for_a_batch_then_those_behind_fail_with_it(
    store: KeyedStore, values: InMemory, memory: SharedBytes
) -> None:
    store.pause_writes()
    wanted = keys(*range(100))
    for name in wanted:
        store.put([name], None, memory, offsets(0))
    values.is_silent = True
    assert store.sync() == 100 and values.num_questions == 1, "somebody waits, and once is enough"
    assert sorted(store.completed()) == sorted((name, "failed") for name in wanted)


def test_pages_when_the_store_has_let_go_of_them_then_they_are_asked_for_again_in_the_end_and_written(
    stored: KeyedStore, values: InMemory, memory: SharedBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    values.held.clear()
    assert stored.lookup(keys(0, 1)).num_pages == 2
    now_s = time.monotonic() + KNOWN_S
    monkeypatch.setattr(stored._presence, "_clock", lambda: now_s)
    assert stored.lookup(keys(0, 1)).num_pages == 0 and stored.ask(keys(0, 1)) is not None
    assert stored.put(keys(0, 1), None, memory, offsets(0, 1)) == ["queued"] * 2
    assert stored.sync() == 0 and len(values.held) == 2


def test_close_when_the_library_answers_no_question_then_it_is_not_waited_for(
    stored: KeyedStore, values: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed, "LEAVE_S", 0.05)
    values.is_open.clear()
    assert stored.ask(keys(4)) is not None
    begun_s = time.monotonic()
    stored.close()
    assert time.monotonic() - begun_s < 5
    values.is_open.set()


def test_close_when_a_write_hangs_then_nothing_else_is_waited_for_and_the_library_is_not_called_again(
    store: KeyedStore, values: InMemory, memory: SharedBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed, "LEAVE_S", 0.05)
    waits_s: list[float] = []
    for one in (store._asked, store._workers):
        monkeypatch.setattr(one, "close", waits_s.append)
    drop = store._writes.drop
    monkeypatch.setattr(store._writes, "drop", lambda within_s: waits_s.append(within_s) or drop(within_s))
    is_asked, goes_on = hanging(values, "write", monkeypatch)
    store.put(keys(0), None, memory, offsets(0))
    is_asked.wait()
    store.close()
    assert waits_s == [0.0] * 3
    goes_on.set()
    store._writes._thread.join()
    assert len(values.held) == 1, "it would have to be asked to remove it"


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_library_when_it_has_failed_a_question_then_it_is_left_alone(
    store: KeyedStore, values: InMemory, kind: type[Exception]
) -> None:
    values.is_silent, values.error = True, kind("it does not answer")
    assert store.ask(keys(0)) is not None
    until(lambda: bool(store.answers()))
    assert store.ask(keys(0)) is None and values.num_questions == 1, "requests would wait for the answer"


def test_library_when_it_hangs_then_waiters_go_on_and_nothing_more_is_asked_of_it(
    stored: KeyedStore, values: InMemory, memory: SharedBytes
) -> None:
    values.is_open.clear()
    found = stored.lookup(keys(0, 1))
    read = stored.read(found, 2, memory, offsets(4, 5))
    until(lambda: read.is_late)
    assert not read.has_ended, "the library may still write to these frames"
    assert stored.lookup(keys(0, 1)).num_pages == 0 and stored.ask(keys(0)) is None
    assert stored.put(keys(2), None, memory, offsets(2)) == ["full"]
    refused = stored.read(found, 1, memory, offsets(6))
    assert refused.is_late and refused.finish() == [(0, "late")], "no batch is promised its pages"
    assert stored.stats()["stalls"] == 1 and stored.stats()["is_stopped"] == 0, "it comes back by itself"
    values.is_open.set()
    assert {reason for _, reason in read.finish()} == {"late"}
    until(lambda: stored.put(keys(2), None, memory, offsets(2)) == ["queued"])


@pytest.mark.parametrize("is_closed", [False, True])
def test_reads_when_their_turn_does_not_come_for_a_library_that_hangs_then_their_waiters_go_on_as_well(
    stored: KeyedStore, values: InMemory, memory: SharedBytes, is_closed: bool
) -> None:
    values.is_open.clear()
    found = stored.lookup(keys(0))
    reads = [stored.read(found, 1, memory, offsets(4 + number)) for number in range(NUM_READERS + 1)]
    until(lambda: all(read.is_late for read in reads))
    assert stored.stats()["stalls"] == NUM_READERS
    if is_closed:
        stored.close()
        reads[-1].finish()
    values.is_open.set()
    assert [read.finish() for read in reads] == [[(0, "late")]] * len(reads)
    until(lambda: is_closed or stored.put(keys(2), None, memory, offsets(2)) == ["queued"])


def test_page_when_it_is_not_written_then_a_line_says_so(
    store: KeyedStore, values: InMemory, memory: SharedBytes, caplog: pytest.LogCaptureFixture
) -> None:
    values.write = lambda written: [False] * len(written)  # type: ignore[method-assign]
    store.put(keys(0), None, memory, offsets(0))
    assert store.sync() == 1 and "1 page(s) were not written" in caplog.text


def test_page_when_it_is_damaged_and_cannot_be_removed_then_that_is_counted(
    stored: KeyedStore, values: InMemory, memory: SharedBytes, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(names: Sequence[str]) -> int:
        raise OSError("read-only file system")

    values.held = {name: bytes(len(value)) for name, value in values.held.items()}
    values.remove = fail  # type: ignore[method-assign]
    stored.read(stored.lookup(keys(0)), 1, memory, offsets(4)).finish()
    assert stored.stats()["checksum_failures"] == 1 and stored.stats()["read_errors"] == 1


@pytest.mark.parametrize("hangs_in", ["present", "write"])
def test_weights_when_a_write_hangs_through_their_update_then_nothing_else_is_found_under_its_name(
    values: InMemory, memory: SharedBytes, monkeypatch: pytest.MonkeyPatch, hangs_in: str
) -> None:
    """The frame is another page's by then: of other weights, or of another tenant. What was given up does not go."""
    monkeypatch.setattr(keyed, "LEAVE_S", 0.2)
    monkeypatch.setattr(values, "remove", lambda names: 0)
    is_asked, goes_on = hanging(values, hangs_in, monkeypatch)
    store = KeyedStore(values, namespace=b"n" * 32, layer_bytes=LAYER_BYTES, stall_s=STALL_S)
    store.put(keys(0), None, memory, offsets(0))
    is_asked.wait()
    with pytest.raises(TimeoutError):
        store.sync(0.2)
    store.invalidate(b"w" * 32)
    store.put(keys(0), None, memory, offsets(1))
    np.frombuffer(memory, dtype=np.uint8)[:FRAME_BYTES] = 7
    goes_on.set()
    store.sync()
    assert store.completed() == [(*keys(0), "stored")], "that of the new weights"
    store.close()

    other = KeyedStore(values, namespace=b"n" * 32, layer_bytes=LAYER_BYTES, stall_s=STALL_S)
    number = other.ask(keys(0))
    answers: list[Any] = []
    until(lambda: answers.extend(other.answers()) or bool(answers))
    if hangs_in == "present":
        assert answers == [(number, None)]
    else:
        ((_, found),) = answers
        ((position, _),) = other.read(found, 1, memory, offsets(5)).finish()
        assert position == 0 and other.stats()["checksum_failures"] == 1
    other.close()


@pytest.mark.parametrize("within_s", [None, STALL_S])
def test_sync_when_the_library_hangs_then_an_error_in_time_and_what_waits_fails(
    values: InMemory, memory: SharedBytes, within_s: float | None
) -> None:
    stall_s = STALL_S if within_s is None else 60.0
    store = KeyedStore(values, namespace=b"n" * 32, layer_bytes=LAYER_BYTES, stall_s=stall_s)
    values.is_open.clear()
    store.put(keys(0), None, memory, offsets(0))
    until(lambda: values.num_questions == 1)
    store.put(keys(1, 2), keys(0)[0], memory, offsets(1, 2))
    with pytest.raises(TimeoutError, match="2 pages were given up, 1 are on their way"):
        store.sync(within_s)
    assert sorted(store.completed()) == sorted((name, "failed") for name in keys(1, 2))
    assert store.stats()["sync_timeouts"] == 1
    values.is_open.set()
    until(lambda: store.completed() == [(keys(0)[0], "stored")])
    store.close()


def test_flush_when_the_library_hangs_then_nobody_waits_for_it_and_it_is_said(
    stored: KeyedStore, values: InMemory
) -> None:
    values.is_open.clear()
    with pytest.raises(TimeoutError, match="not removed 2 page"):
        stored.clear()
    assert stored.lookup(keys(0)).num_pages == 0
    values.is_open.set()
    until(lambda: not values.held)


def test_flush_when_a_write_hangs_then_it_is_said_and_its_page_goes_when_it_is_written(
    store: KeyedStore, values: InMemory, memory: SharedBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed, "LEAVE_S", 0.05)
    is_asked, goes_on = hanging(values, "write", monkeypatch)
    store.put(keys(0), None, memory, offsets(0))
    is_asked.wait()
    with pytest.raises(TimeoutError, match="still writes"):
        store.clear()
    goes_on.set()
    done: list[tuple[str, str]] = []
    until(lambda: bool(done.extend(store.completed()) or done))
    assert done == [(*keys(0), "failed")] and not values.held and store.lookup(keys(0)).num_pages == 0
    store.put(keys(0), None, memory, offsets(0))
    assert store.sync() == 0 and store.clear() == 1 and not values.held


def test_flush_when_the_library_refuses_then_it_is_said_that_others_may_find_the_pages(
    stored: KeyedStore, values: InMemory
) -> None:
    values.is_silent = True
    with pytest.raises(OSError, match="does not answer"):
        stored.clear()
    values.is_silent = False
    assert stored.clear() == 2 and not values.held


@pytest.mark.parametrize("call", ["present", "write"])
def test_library_when_it_hangs_in_a_question_or_a_write_then_one_stall_and_one_line_each_time(
    values: InMemory, memory: SharedBytes, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = KeyedStore(values, namespace=b"n" * 32, layer_bytes=LAYER_BYTES, stall_s=0.05)
    monkeypatch.setattr(store, "_log", Mock())
    is_asked, goes_on = hanging(values, call, monkeypatch)

    def asks(number: int) -> None:
        if call == "present":
            store.ask(keys(number))
        else:
            store.put(keys(number), None, memory, offsets(0))

    for number in (1, 2):
        is_asked.clear()
        goes_on.clear()
        asks(number)
        is_asked.wait()
        assert store.stats()["stalls"] == number - 1
        time.sleep(0.1)
        for _ in range(3):
            asks(9)
        assert store.stats()["stalls"] == store._log.about.call_count == number
        goes_on.set()
        until(
            lambda: min(store._asked.since_s, store._writes.since_s) == float("inf") and not store._writes.num_waiting
        )
        store._look()
    store.close()


def test_flush_when_there_is_no_thread_then_it_is_said_and_the_next_one_removes_the_pages(
    stored: KeyedStore, values: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(evictions, "start_thread", fails)
        with pytest.raises(OSError, match="can't start new thread"):
            stored.clear()
    assert stored.clear() == 2 and not values.held


def test_writer_when_its_thread_fails_then_every_frame_comes_back_and_nothing_more_is_taken(
    store: KeyedStore, memory: SharedBytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> int:
        raise RuntimeError("a fault on purpose")

    monkeypatch.setattr(store._writes, "_num_allowed", fail)
    store.put(keys(0, 1), None, memory, offsets(0, 1))
    done: list[tuple[str, str]] = []
    until(lambda: bool(done.extend(store.completed()) or len(done) == 2))
    assert {outcome for _, outcome in done} == {"failed"} and "a fault on purpose" in caplog.text
    assert store.put(keys(2), None, memory, offsets(2)) == ["full"]
    assert store.sync() == 0 and store.stats()["is_stopped"] == 1


@pytest.mark.parametrize("at", [0, 20, 4096, 4096 + 5000, -1], ids=["magic", "sum", "first", "second", "last"])
def test_value_when_one_bit_is_wrong_then_the_page_fails_alone_and_goes(
    stored: KeyedStore, values: InMemory, memory: SharedBytes, at: int
) -> None:
    name = next(name for name in values.held if name.endswith(keys(0)[0]))
    value = bytearray(values.held[name])
    value[at] ^= 1
    values.held[name] = bytes(value)
    read = stored.read(stored.lookup(keys(0, 1)), 2, memory, offsets(4, 5))
    assert read.finish() == [(0, "checksum")]
    pages = np.frombuffer(memory, dtype=np.uint8).reshape(NUM_FRAMES, FRAME_BYTES)
    assert (pages[1] == pages[5]).all()
    until(lambda: name not in values.held)


def test_value_when_it_is_another_pages_then_it_fails(
    stored: KeyedStore, values: InMemory, memory: SharedBytes
) -> None:
    first, second = sorted(values.held)
    values.held[first], values.held[second] = values.held[second], values.held[first]
    failed = stored.read(stored.lookup(keys(0, 1)), 2, memory, offsets(4, 5)).finish()
    assert sorted(failed) == [(0, "checksum"), (1, "checksum")]


def test_read_when_the_rate_is_limited_then_no_faster(values: InMemory, memory: SharedBytes) -> None:
    store = KeyedStore(values, namespace=b"n" * 32, layer_bytes=LAYER_BYTES, read_bytes_per_s=4 * FRAME_BYTES)
    store.put(keys(0), None, memory, offsets(0))
    store.sync()
    began_s = time.monotonic()
    assert store.read(store.lookup(keys(0)), 1, memory, offsets(4)).finish() == []
    assert time.monotonic() - began_s >= 0.25
    store.close()


def test_write_when_pages_are_stored_then_what_a_page_takes_is_what_was_written(
    stored: KeyedStore, values: InMemory
) -> None:
    assert stored.stats()["written_bytes"] == 2 * stored.value_bytes == sum(map(len, values.held.values()))


def test_put_when_another_writer_was_first_then_present_and_not_written_again(
    stored: KeyedStore, values: InMemory, memory: SharedBytes
) -> None:
    other = KeyedStore(values, namespace=b"n" * 32, layer_bytes=LAYER_BYTES)
    assert other.put(keys(0), None, memory, offsets(0)) == ["queued"], "it has not asked yet"
    assert other.sync() == 0
    assert other.completed() == [(keys(0)[0], "present")] and other.stats()["written_pages"] == 0
    assert other.put(keys(0), None, memory, offsets(0)) == ["present"]
    other.close()


def test_value_format_when_layers_are_odd_then_the_header_is_a_block_and_says_all() -> None:
    value_format = ValueFormat((100, 200, 300))
    header = memoryview(bytearray(value_format.header_bytes))
    value_format.write_header(header, [1, 2, 3])
    assert value_format.header_bytes == 4096 and value_format.value_bytes == 4096 + 600 and not value_format.is_aligned
    assert value_format.sums_of(header) == (1, 2, 3)
    assert ValueFormat((100, 200, 301)).sums_of(header) is None, "a page of another form"
    assert value_format.steps(2, 0) == [range(0, 2), range(2, 3)]
    assert value_format.steps(1, 250) == [range(0, 2), range(2, 3)], "no step of less"
    assert value_format.steps(1, 10_000) == [range(0, 3)]
