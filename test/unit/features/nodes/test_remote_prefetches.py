# SPDX-License-Identifier: Apache-2.0
"""A prompt of which another node reads a part from its store: two nodes, real sockets, the real native core."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
from test.unit.arena.test_backup import Host
from test.unit.arena.test_prefetch import make_prefetch
from test.unit.cache_rig import request
from test.unit.directory.rig import frames, keys
from test.unit.features.nodes.rig import StoreNode, until
from test.unit.features.nodes.test_remote_leases import FakeLease

from banyan._native import RankTable
from banyan.arena.prefetch import joined
from banyan.core import Run, SourceKind
from banyan.features.nodes import questions
from banyan.features.nodes.pull import NodeFound
from banyan.features.nodes.remote_leases import RemoteLeases
from banyan.features.nodes.remote_prefetch_tier import NEWS_S, RemotePrefetchTier
from banyan.features.nodes.remote_prefetches import BORROW_S, MAX_REMOTE_PREFETCHES, RemotePrefetch, RemotePrefetches
from banyan.features.nodes.wire import Answer

PAGES = [1, 2, 3, 4]
SOURCES = [3, 4, 5, 6]
TARGETS = [9, 1, 7, 2]
SLOW_BYTES_PER_S = 40_000
"""Four pages, of 12 KiB each, take more than a second."""


def all_found(num_missing: int, found: Run) -> int:
    return found.num_pages


class Pair:
    """``d`` reads for ``p``; both have the same pages in their stores, and nowhere else."""

    def __init__(
        self, folder: Path, *, d_folder: Path | None = None, d_bytes_per_s: int | None = None, max_pages: int = 100
    ) -> None:
        writer = StoreNode(folder)
        self.pages = writer.save(PAGES, SOURCES)
        writer.close()
        if d_folder is not None:
            shutil.copytree(folder, d_folder)
        self.d = StoreNode(d_folder or folder, read_bytes_per_s=d_bytes_per_s)
        self.p = StoreNode(folder)
        self.node = str(self.d.lend(max_pages=max_pages))
        self.p.borrow_from(self.d.page_server.address)
        self._kinds: dict[str, SourceKind] = {}
        self._start, self.p.prefetch._start = self.p.prefetch._start, self._note_start
        until(lambda: self.p.borrower.num_listening == 1)

    def _note_start(self, keys, worth, found, start, kind, *more) -> None:
        self._kinds.update(dict.fromkeys(keys[: found.num_pages], kind))
        self._start(keys, worth, found, start, kind, *more)

    def arrive(self, first_page: int) -> None:
        self.p.arrive("r", keys(*PAGES), 0, all_found, node=self.node, first_page=first_page)

    def wait(self, *, with_d: bool = True) -> None:
        until(lambda: self.p.poll() or (with_d and self.d.poll()) or not self.p.remote.is_awaited("r"))

    def fetch(self) -> tuple[Run, ...]:
        """Into the pool; from the other node or from here. The bytes are the right ones."""
        offer = self.p.cache.prepare(request("r"), keys(*PAGES))
        if not offer.num_pages:
            return ()
        names, targets = keys(*PAGES)[: offer.num_pages], TARGETS[: offer.num_pages]
        assert self.p.cache.admit("r", names, frames(*targets)).runs == offer.runs
        assert self.p.cache.finish(self.p.cache.start())
        assert [self.p.rank.pages(frame) for frame in targets] == self.pages[: offer.num_pages]
        starts = accumulate((run.num_pages for run in offer.runs), initial=0)
        pieces = zip(offer.runs, starts, strict=False)
        return tuple(joined([came for run, start in pieces for came in self._came(run, names[start:])]))

    def _came(self, run: Run, names: Sequence[str]) -> list[Run]:
        """What has landed by now is in the arena; by whom it was brought, page by page."""
        if run.kind is not SourceKind.HOST:
            return [run]
        there = Run(SourceKind.REMOTE, 1, self.node)
        return [there if self._kinds[name] is SourceKind.REMOTE else own(1) for name in names[: run.num_pages]]

    def nothing_is_left(self) -> None:
        until(lambda: self.p.poll() or self.d.poll() or not self.p.residency.num_filling + self.d.residency.num_filling)
        until(lambda: self.d.page_server is None or self.d.page_server.lending.remote_leases.num_remote_leases == 0)
        assert not self.p.remote.is_sent_for("r")

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture
def made() -> Iterator[SimpleNamespace]:
    pairs: list[Pair] = []

    def make(*args, **more) -> Pair:
        pairs.append(Pair(*args, **more))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def damage(folder: Path, content: bytes) -> None:
    """Flip a bit of this content."""
    (segment,) = [path for path in folder.rglob("*") if path.is_file() and content in path.read_bytes()]
    written = bytearray(segment.read_bytes())
    written[written.index(content)] ^= 1
    segment.write_bytes(written)


def own(num_pages: int) -> Run:
    return Run(SourceKind.STORE, num_pages)


@pytest.mark.parametrize("first_page", [0, 1, 3])
def test_prompt_when_the_other_node_reads_its_end_then_both_parts_come_with_the_right_bytes(made, tmp_path, first_page):
    pair = made(tmp_path / "store")
    pair.d.take_remote_prefetches()
    pair.arrive(first_page)
    assert pair.p.remote.is_sent_for("r")
    assert pair.p.prefetch.num_arriving(keys(*PAGES)) == first_page, "its own part, and nothing of the other's"
    waiting = pair.p.cache.prepare(request("r"), keys(*PAGES))
    assert waiting.num_pages == first_page and pair.p.counters.reads == (first_page > 0)
    pair.wait()
    there = Run(SourceKind.REMOTE, 4 - first_page, pair.node)
    assert pair.fetch() == ((own(first_page), there) if first_page else (there,))
    pair.nothing_is_left()
    p, d = pair.p.counters, pair.d.counters
    assert (p.remote_prefetches_sent, p.remote_prefetches_failed, d.remote_prefetches) == (1, 0, 1)
    assert (p.read_pages, d.read_pages, p.pull_pages) == (first_page, 4 - first_page, 4 - first_page)


def test_remote_prefetch_when_the_node_has_the_pages_in_its_arena_then_it_reads_nothing(made, tmp_path):
    pair = made(tmp_path / "store")
    pair.d.take_remote_prefetches()
    pair.d.prefetch.start_reads(keys(*PAGES), all_found)
    until(lambda: pair.d.poll() or pair.d.residency.num_resident == 4)
    pair.arrive(0)
    pair.wait()
    assert pair.fetch() == (Run(SourceKind.REMOTE, 4, pair.node),)
    assert pair.d.counters.reads == 1


def test_node_when_it_is_told_to_read_and_has_no_store_then_it_refuses_in_one_line(made, tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="banyan")
    pair = made(tmp_path / "store")
    for _ in range(2):
        pair.p.residency.reset()
        pair.arrive(2)
        pair.wait(with_d=False)
        until(lambda: pair.p.poll() or pair.p.residency.num_resident == len(PAGES))
    assert pair.fetch() == (own(4),)
    assert sum("does not read for this one: it has no --banyan-store" in line for line in caplog.messages) == 1
    assert pair.p.counters.remote_prefetches_failed == 2


def test_remote_prefetch_when_it_is_larger_than_a_node_takes_then_all_is_read_here(made, tmp_path):
    pair = made(tmp_path / "store", max_pages=1)
    pair.d.take_remote_prefetches()
    pair.arrive(2)
    pair.wait(with_d=False)
    assert pair.fetch() == (own(4),)


def test_remote_prefetch_when_it_takes_all_that_may_be_lent_then_what_it_brought_is_lent(made, tmp_path):
    pair = made(tmp_path / "store", max_pages=3)
    pair.d.take_remote_prefetches()
    pair.arrive(1)
    pair.wait()
    assert pair.fetch() == (own(1), Run(SourceKind.REMOTE, 3, pair.node))
    pair.nothing_is_left()
    assert pair.d.page_server.lending.remote_leases.num_to_lend == 3


def test_remote_prefetch_when_all_has_come_here_meanwhile_then_nothing_is_read(made, tmp_path):
    pair = made(tmp_path / "store")
    pair.d.take_remote_prefetches()
    pair.arrive(0)
    pair.p.keep(PAGES, SOURCES)
    pair.wait()
    assert (pair.p.counters.pulls, pair.p.counters.reads, pair.p.residency.num_filling) == (0, 0, 0)
    assert pair.p.counters.remote_prefetches_failed == 0, "the node has brought all of it"


def test_remote_prefetch_when_its_beginning_has_come_here_meanwhile_then_the_rest_is_lent_out_of_its_room(
    made, tmp_path
):
    pair = made(tmp_path / "store", max_pages=4)
    pair.d.take_remote_prefetches()
    pair.arrive(0)
    pair.p.keep(PAGES[:2], SOURCES[:2])
    pair.wait()
    until(lambda: pair.p.poll() or pair.d.poll() or pair.p.residency.num_resident == 4)
    assert (pair.p.counters.pull_pages, pair.p.counters.reads) == (2, 0)


def test_prompt_when_it_is_looked_up_again_while_its_pages_are_on_their_way_then_they_are_not_asked_for_again(
    made, tmp_path
):
    pair = made(tmp_path / "store")
    pair.d.take_remote_prefetches()
    pair.arrive(1)
    pair.wait()
    # They may have landed by now.
    num_held = pair.p.residency.num_resident
    pair.p.look_again("r", keys(*PAGES), num_held, all_found, node=pair.node, first_page=1)
    assert not pair.p.remote.is_sent_for("r")
    assert pair.fetch() == (own(1), Run(SourceKind.REMOTE, 3, pair.node))
    assert (pair.p.counters.remote_prefetches_sent, pair.p.counters.reads) == (1, 1)


def test_remote_prefetch_when_it_brings_nothing_then_nothing_of_it_is_remembered(made, tmp_path):
    pair = made(tmp_path / "store", d_folder=tmp_path / "elsewhere")
    pair.d.take_remote_prefetches()
    pair.d.store.evict(1000)
    pair.arrive(0)
    pair.wait()
    assert pair.p.counters.remote_prefetches_failed == 1 and pair.d.remote_prefetches._held == {}
    assert pair.fetch() == (own(4),)


def test_pages_when_others_want_every_frame_before_they_are_borrowed_then_they_stay_that_long(made, tmp_path):
    pair = made(tmp_path / "store")
    d = pair.d
    d.take_remote_prefetches()
    pair.arrive(0)
    until(lambda: d.poll() or d.residency.num_resident == len(PAGES))
    until(lambda: d.poll() or d.remote_prefetches._held)
    d.residency.abandon(d.residency.claim(1000))
    assert d.residency.num_resident == len(PAGES)
    pair.wait()
    assert pair.fetch() == (Run(SourceKind.REMOTE, 4, pair.node),)
    pair.nothing_is_left()
    until(lambda: d.poll() or not d.remote_prefetches._held)
    d.residency.abandon(d.residency.claim(1000))
    assert d.residency.num_resident == 0


class Line:
    """Remote prefetches in a room of a few pages, without a page server; ``now_s`` is the time."""

    def __init__(self, *, max_pages: int = 5, max_lent: int | None = None) -> None:
        self.now_s = 0.0
        self.remote_leases = RemoteLeases(max_pages=max_lent or max_pages, clock=lambda: self.now_s)
        self.remote_prefetches = RemotePrefetches(
            max_pages=max_pages, remote_leases=self.remote_leases, clock=lambda: self.now_s, wake=lambda: None
        )

    def remote_prefetch(self, number: int, *pages: int) -> RemotePrefetch:
        made = RemotePrefetch(b"p", number, keys(*pages))
        assert self.remote_prefetches.ask(made)
        return made

    def answers(self) -> dict[int, int]:
        return {said.number: said.num_pages for _, said in self.remote_prefetches.to_say() if isinstance(said, Answer)}


def test_remote_prefetches_when_there_is_no_room_for_all_then_the_others_wait_in_line_until_pages_come_back():
    line = Line()
    first, second, third = (
        line.remote_prefetch(1, 1, 2, 3),
        line.remote_prefetch(2, 4, 5, 6),
        line.remote_prefetch(3, 7),
    )
    assert line.remote_prefetches.take() == [first], "nobody overtakes, also who would fit"
    line.remote_prefetches.over(first, 3)
    assert line.answers() == {1: 3} and line.remote_prefetches.take() == []
    assert line.remote_prefetches.take_brought(b"other", keys(1)[0]) is None
    brought = line.remote_prefetches.take_brought(b"p", keys(1)[0])
    lease = FakeLease(brought.num_pages)
    line.now_s += 2 * BORROW_S
    assert lease.num_pages == 3 and line.answers() == {} and line.remote_leases.num_to_lend == 2
    remote_lease = line.remote_leases.lend(lease, None)
    assert line.remote_prefetches.let_go() == []
    line.remote_prefetches.borrowed(brought)
    assert line.remote_prefetches.take() == [] and line.remote_prefetches.take_brought(b"p", keys(1)[0]) is None
    assert line.remote_prefetches.let_go() == [first]
    line.remote_leases.give_back(remote_lease.token)
    assert line.remote_prefetches.take() == [second, third]


def test_remote_prefetch_when_another_has_its_first_page_too_then_each_borrow_finds_its_own_room():
    line = Line(max_pages=20)
    first, second = line.remote_prefetch(1, *range(10, 16)), line.remote_prefetch(2, *range(12, 18))
    line.remote_prefetches.take()
    for one in (first, second):
        line.remote_prefetches.over(one, 6)
    assert line.remote_prefetches.take_brought(b"p", keys(12)[0]).remote_prefetch == second
    assert line.remote_prefetches.take_brought(b"p", keys(10)[0]).remote_prefetch == first


def test_remote_prefetch_when_only_its_end_is_borrowed_then_its_room_is_for_that_and_given_back():
    line = Line(max_pages=10)
    first = line.remote_prefetch(1, *range(10))
    line.remote_prefetches.take()
    line.remote_prefetches.over(first, 8)
    assert line.remote_prefetches.take_brought(b"other", keys(2)[0]) is None
    assert line.remote_prefetches.take_brought(b"p", keys(8)[0]) is None, "it was not brought"
    brought = line.remote_prefetches.take_brought(b"p", keys(2)[0])
    assert brought.num_pages == 8 and line.remote_leases.num_to_lend == 2
    line.remote_leases.lend(FakeLease(6), None)
    line.remote_prefetches.borrowed(brought)
    assert line.remote_prefetches.let_go() == [first]
    assert line.remote_leases.num_to_lend == 4, "nothing is reserved any more"


def test_remote_prefetch_when_it_brings_a_part_or_nobody_borrows_it_then_its_room_is_given_back():
    line = Line()
    first, second = line.remote_prefetch(1, 1, 2, 3, 4), line.remote_prefetch(2, 5, 6, 7)
    line.remote_prefetches.take()
    line.remote_prefetches.over(first, 2)
    assert line.remote_leases.num_to_lend == 3
    assert line.remote_prefetches.take() == [second]
    line.remote_prefetches.over(second, 0)
    line.now_s = BORROW_S
    assert line.answers() == {1: 2, 2: 0} and line.remote_leases.num_to_lend == 5
    assert line.remote_prefetches.take_brought(b"p", keys(1)[0]) is None
    assert line.remote_leases.num_to_lend == 5


class EmptyStore:
    """Counts how often it is asked."""

    num_lookups = 0

    def lookup(self, keys: Sequence[str]) -> NodeFound:
        self.num_lookups += 1
        return NodeFound("", 0, ())


def test_remote_prefetch_when_nobody_has_its_pages_then_they_are_looked_for_now_and_then_until_it_is_over():
    line, store, host = Line(), EmptyStore(), Host(RankTable.create(4), 0)
    tier = RemotePrefetchTier(
        line.remote_prefetches,
        prefetch=make_prefetch(host, store),
        residency=host.residency,
        counters=host.counters,
        clock=lambda: line.now_s,
    )
    line.remote_prefetch(1, 1, 2)
    for _ in range(100):
        tier.poll()
        line.now_s += 0.001
    assert 2 <= store.num_lookups <= 4
    line.now_s += NEWS_S
    tier.poll()
    assert line.answers() == {1: 0}


def test_remote_prefetch_when_it_is_in_line_for_longer_than_anybody_waits_then_nothing_is_read_for_it():
    line = Line()
    first, _ = line.remote_prefetch(1, 1, 2, 3), line.remote_prefetch(2, 4, 5, 6)
    assert line.remote_prefetches.take() == [first]
    line.now_s = questions.MOST_READ_S
    assert line.remote_prefetches.take() == [] and line.answers() == {2: 0}


def test_remote_prefetches_when_they_end_then_all_are_answered_and_no_room_is_kept():
    line = Line()
    done, _, _ = line.remote_prefetch(1, 1), line.remote_prefetch(2, 2, 3), line.remote_prefetch(3, 4, 5, 6)
    line.remote_prefetches.take()
    line.remote_prefetches.over(done, 1)
    line.remote_prefetches.end()
    assert line.answers() == {1: 1, 2: 0, 3: 0} and line.remote_leases.num_to_lend == 5
    assert line.remote_prefetches.let_go() == [done]
    line.remote_prefetches.over(done, 1)
    assert line.answers() == {} and line.remote_prefetches.take() == [] and line.remote_prefetches.let_go() == [done]


def test_remote_prefetch_when_it_is_larger_than_all_that_may_be_lent_or_too_many_are_here_then_it_is_refused():
    line = Line()
    assert not line.remote_prefetches.ask(RemotePrefetch(b"p", 1, keys(*range(1, 7))))
    for number in range(MAX_REMOTE_PREFETCHES):
        line.remote_prefetch(number, 1)
    assert not line.remote_prefetches.ask(RemotePrefetch(b"p", 99, keys(2)))


def test_remote_prefetches_when_more_may_be_lent_than_one_part_of_the_arena_has_then_they_do_not_fill_that():
    line = Line(max_pages=5, max_lent=20)
    assert not line.remote_prefetches.ask(RemotePrefetch(b"p", 9, keys(*range(6))))
    first, second, third = (line.remote_prefetch(number, *range(3 * number, 3 * number + 3)) for number in range(3))
    assert line.remote_prefetches.take() == [first]
    line.remote_prefetches.over(first, 3)
    assert line.remote_prefetches.take() == [], "what is brought counts until it is borrowed"
    line.remote_prefetches.borrowed(line.remote_prefetches.take_brought(b"p", keys(0)[0]))
    assert line.remote_prefetches.take() == [second]
    line.remote_prefetches.over(second, 2)
    assert line.remote_prefetches.take() == [third], "and no more than was brought"
    line.remote_prefetches.over(third, 3)
    line.now_s += BORROW_S
    assert line.answers() == {0: 3, 1: 2, 2: 3} and line.remote_leases.num_to_lend == 20
    assert line.remote_prefetches.take() == [] and line.remote_prefetches.ask(RemotePrefetch(b"p", 10, keys(*range(5))))
    assert len(line.remote_prefetches.take()) == 1


@pytest.mark.parametrize("node", ["127.0.0.1:1", "garbage", ""])
def test_hint_when_it_names_a_node_that_is_none_of_the_peers_then_all_is_read_here_at_once(made, tmp_path, node):
    pair = made(tmp_path / "store")
    pair.node = node
    pair.arrive(1)
    assert not pair.p.remote.is_awaited("r") and pair.p.counters.remote_prefetches_sent == 0
    assert pair.fetch() == (own(4),)


def test_hint_when_it_names_tokens_behind_what_is_stored_then_nobody_is_asked(made, tmp_path):
    pair = made(tmp_path / "store")
    pair.d.take_remote_prefetches()
    pair.arrive(4)
    assert not pair.p.remote.is_awaited("r") and pair.fetch() == (own(4),)


def test_part_when_it_is_too_small_for_a_second_reader_then_it_is_read_here(made, tmp_path):
    pair = made(tmp_path / "store")
    pair.d.take_remote_prefetches()
    pair.p.path._least_pages = 3
    pair.arrive(2)
    assert not pair.p.remote.is_awaited("r") and pair.fetch() == (own(4),)


def test_prompt_when_its_pages_leave_after_it_came_then_the_other_node_reads_them_all_the_same(made, tmp_path):
    pair = made(tmp_path / "store")
    pair.d.take_remote_prefetches()
    pair.p.arrive("r", keys(*PAGES), len(PAGES), all_found, node=pair.node, first_page=0)
    assert not pair.p.remote.is_awaited("r"), "all were here"
    pair.p.look_again("r", keys(*PAGES), 0, all_found, node=pair.node, first_page=0)
    assert pair.p.remote.is_sent_for("r") and pair.p.counters.reads == 0
    pair.wait()
    assert pair.fetch() == (Run(SourceKind.REMOTE, 4, pair.node),)


def test_own_part_when_it_is_not_worth_reading_then_nobody_reads_what_lies_behind_it(made, tmp_path):
    pair = made(tmp_path / "store")
    pair.d.take_remote_prefetches()

    def remote_only(num_missing: int, found: Run) -> int:
        return found.num_pages if found.kind is SourceKind.REMOTE else 0

    pair.p.arrive("r", keys(*PAGES), 0, remote_only, node=pair.node, first_page=2)
    assert not pair.p.remote.is_awaited("r") and pair.p.prefetch.num_arriving(keys(*PAGES)) == 0
    pair.p.arrive("r", keys(*PAGES), 0, remote_only, node=pair.node, first_page=0)
    assert pair.p.remote.is_awaited("r"), "there is no own part"


def test_node_when_it_is_killed_while_it_reads_then_the_rest_is_read_here(made, tmp_path, monkeypatch):
    monkeypatch.setattr(questions, "SILENCE_S", 0.3)
    pair = made(tmp_path / "store", d_bytes_per_s=SLOW_BYTES_PER_S)
    pair.d.take_remote_prefetches()
    pair.arrive(1)
    until(lambda: pair.p.poll() or pair.d.poll() or pair.d.prefetch.num_reading)
    # As a kill: nothing is answered any more.
    page_server, pair.d.page_server, pair.d.remote_prefetches = pair.d.page_server, None, None
    page_server._remote_prefetches._said_s.clear()
    page_server._remote_prefetches._over.clear()
    page_server.close()
    assert pair.p.remote.is_sent_for("r")
    pair.wait(with_d=False)
    assert pair.p.borrower.num_listening == 0
    assert pair.fetch() == (own(4),)
    assert (pair.p.counters.remote_prefetches_failed, pair.p.counters.pulls) == (1, 0)
    pair.nothing_is_left()


def test_node_when_its_rank_stands_still_then_the_rest_is_read_here_after_a_while(made, tmp_path, monkeypatch):
    monkeypatch.setattr(questions, "MOST_READ_S", 0.6)
    pair = made(tmp_path / "store")
    pair.d.take_remote_prefetches()
    pair.arrive(1)
    pair.wait(with_d=False)
    assert pair.p.borrower.num_listening == 1, "its page server goes on answering"
    assert pair.fetch() == (own(4),)
    # The answer comes when nobody waits for it any more.
    until(lambda: pair.d.poll() or pair.d.residency.num_resident == 3)
    pair.nothing_is_left()
    assert pair.p.counters.pulls == 0


def test_node_when_its_record_is_damaged_then_what_lies_behind_it_is_read_here(made, tmp_path):
    pair = made(tmp_path / "store", d_folder=tmp_path / "other")
    pair.d.take_remote_prefetches()
    damage(tmp_path / "other", pair.pages[2][1])
    pair.arrive(0)
    pair.wait()
    assert pair.fetch() == (Run(SourceKind.REMOTE, 2, pair.node), own(2))
    assert (pair.d.counters.read_failed_pages, pair.p.counters.remote_prefetches_failed) == (1, 1)
    pair.nothing_is_left()


def test_weights_when_they_change_while_a_node_reads_then_the_rest_is_read_here(made, tmp_path):
    pair = made(tmp_path / "store", d_bytes_per_s=SLOW_BYTES_PER_S)
    pair.d.take_remote_prefetches()
    pair.arrive(2)
    until(lambda: pair.p.poll() or pair.d.poll() or pair.d.prefetch.num_reading)
    pair.d.page_server.withdraw()
    pair.d.remote_prefetches.forget()
    pair.wait(with_d=False)
    assert pair.fetch() == (own(4),)


def test_pages_when_they_leave_the_node_before_they_are_pulled_then_they_are_read_here(made, tmp_path):
    pair = made(tmp_path / "store")
    pair.d.take_remote_prefetches()
    pair.arrive(1)
    until(lambda: pair.d.poll() or pair.d.residency.num_resident == 3)
    pair.d.poll()
    pair.d.remote_prefetches.forget()
    pair.d.residency.reset()
    pair.wait(with_d=False)
    until(lambda: pair.p.poll() or pair.p.counters.pull_failed_pages == 3)
    assert pair.fetch() == (own(4),)
    pair.nothing_is_left()
