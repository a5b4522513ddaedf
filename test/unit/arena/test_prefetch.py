# SPDX-License-Identifier: Apache-2.0
"""Down to the store and up again, over the real native core and a real file system: ranks of one or two servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from test.unit.arena.test_backup import ARENAS, Host
from test.unit.cache_rig import make_cache, request
from test.unit.directory.rig import NAMESPACE, frames, keys

from banyan._native import Feed, Found, RankTable, Read, Store
from banyan.arena import prefetch as prefetch_module
from banyan.arena.owners import Owners
from banyan.arena.page_source import Wanted
from banyan.arena.prefetch import Prefetch
from banyan.arena.store_tier import StoreTier
from banyan.core import Run, SourceKind
from banyan.features.nodes.pull import NodeFound
from banyan.layout import BlockGeometry
from banyan.pacing.admission import Admission, WriteAdmission
from banyan.pacing.allowance import Allowance

LAYER_BYTES = 4096
BLOCK = BlockGeometry(((LAYER_BYTES // 2, LAYER_BYTES // 2),) * 3)


def whole(num_missing: int, stored: Run) -> int:
    return stored.num_pages


def make_prefetch(host: Host, store: Store | None, max_pages: int = 1000) -> Prefetch:
    return Prefetch(
        store=store,
        residency=host.residency,
        peers=host.view,
        arena_slots=ARENAS,
        memory=host.memory,
        frame_bytes=host.block.frame_bytes,
        max_pages=max_pages,
        layers_per_read=1,
        counters=host.counters,
    )


class StoreHost(Host):
    """A rank with arena part and store."""

    def __init__(
        self,
        rank_table: RankTable,
        slot: int,
        folder: Path,
        *,
        admission: Admission = Admission.FIRST_ACCESS,
        num_frames: int = 8,
        max_pages: int = 1000,
        block: BlockGeometry = BLOCK,
        budget: Allowance | None = None,
    ) -> None:
        page_bytes = block.buffer_bytes[0][0]
        super().__init__(rank_table, slot, num_frames=num_frames, page_bytes=page_bytes, block=block)
        self.store = Store.open(
            [str(folder)],
            NAMESPACE,
            block.layer_bytes,
            quota_bytes=64 << 20,
            share_bytes=32 << 20,
            floor_bytes=0,
        )
        self.prefetch = make_prefetch(self, self.store, max_pages)
        self.tier = StoreTier(
            store=self.store,
            residency=self.residency,
            prefetch=self.prefetch,
            memory=self.memory,
            block=block,
            admission=WriteAdmission(admission, budget=budget),
            owners=Owners(),
            counters=self.counters,
        )
        self.cache = make_cache(
            self.rank.frame_table,
            self.rank.peers,
            slot=slot,
            slots=[1 - slot, *ARENAS],
            counters=self.counters,
            prefetch=self.prefetch,
        )

    def save(self, targets: list[int], names: list[str]) -> None:
        """Publish pages of the pool, back them up, and wait until they are stored."""
        self.tier.learn([names])
        self.rank.frame_table.publish(frames(*targets), names)
        self.backup.offer(names)
        for landed in self.wait_landed():
            self.tier.landed(landed.keys)
        self.until(lambda: self.num_writing == 0)

    @property
    def num_writing(self) -> int:
        return len(self.tier._archive._writing)

    def lose(self) -> None:
        """Everything but the store forgets."""
        self.rank.frame_table.reset()
        self.residency.reset()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)
            self.prefetch.poll()
            self.tier.poll()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[StoreHost]:
    made = StoreHost(RankTable.create(4), 0, tmp_path)
    yield made
    made.store.close()


def test_page_when_only_the_store_holds_it_then_it_streams_into_the_pool_and_stays_in_the_arena(
    host: StoreHost,
) -> None:
    before = [host.rank.pages(frame) for frame in (3, 4, 5)]
    host.save([3, 4, 5], keys(1, 2, 3))
    assert host.counters.archived_pages == 3
    host.lose()
    assert host.fetch(keys(1, 2, 3, 4), frames(9, 1, 7, 2)) == (Run(SourceKind.STORE, 3),)
    assert [host.rank.pages(frame) for frame in (9, 1, 7)] == before
    host.until(lambda: host.residency.num_resident == 3)
    assert host.fetch(keys(1, 2, 3), frames(10, 11, 12)) == (Run(SourceKind.HOST, 3),), "now it comes from the arena"
    assert [host.rank.pages(frame) for frame in (10, 11, 12)] == before


def test_write_when_layers_are_padded_on_the_drive_then_the_budget_holds_for_what_is_written_there(
    tmp_path: Path,
) -> None:
    budget = Allowance(per_s=1e-5, burst=60_000, now_s=time.monotonic())
    block = BlockGeometry(((2_500, 2_500),) * 3)
    host = StoreHost(RankTable.create(4), 0, tmp_path, block=block, budget=budget)
    host.save([3, 4, 5, 6, 7], keys(1, 2, 3, 4, 5))
    assert host.store.stats()["written_bytes"] == 2 * block.record_bytes == 57_344
    assert host.counters.archive_refused_pages == 3
    host.store.close()


def test_start_reads_when_the_request_waits_then_the_pages_are_there_before_its_turn(host: StoreHost) -> None:
    host.save([3, 4], keys(1, 2))
    host.lose()
    host.prefetch.start_reads(keys(1, 2), whole)
    host.prefetch.start_reads(keys(1, 2), whole)
    host.until(lambda: host.residency.num_resident == 2)
    assert host.counters.reads == 1 and host.counters.read_pages == 2


@pytest.mark.parametrize("is_followed", [True, False])
def test_read_when_it_has_landed_then_the_planner_hears_how_long_it_took_unless_a_copy_tells(
    host: StoreHost, is_followed: bool
) -> None:
    host.save([3, 4], keys(1, 2))
    host.lose()
    if is_followed:
        assert host.fetch(keys(1, 2), frames(9, 1)) == (Run(SourceKind.STORE, 2),)
    else:
        host.prefetch.start_reads(keys(1, 2), whole)
    host.until(lambda: host.residency.num_resident == 2)
    for _ in range(2):
        host.cache.poll()
    told = [one for one in host.cache._planner.told if one[0] == "was_read"]
    assert told == ([] if is_followed else [("was_read", Run(SourceKind.STORE, 2))])


def test_start_reads_when_only_a_part_is_worth_it_then_only_that_is_read(host: StoreHost) -> None:
    host.save([3, 4, 5], keys(1, 2, 3))
    host.lose()
    asked: list[tuple[int, int]] = []

    def worth(num_missing: int, stored: Run) -> int:
        asked.append((num_missing, stored.num_pages))
        return 2

    host.prefetch.start_reads(keys(1, 2, 3, 4), worth)
    assert asked == [(4, 3)] and host.prefetch.num_arriving(keys(1, 2, 3)) == 2
    host.prefetch.start_reads(keys(1, 2, 3, 4), lambda num_missing, stored: 0)
    host.until(lambda: host.residency.num_resident == 2)
    assert (host.counters.reads, host.counters.read_pages, host.counters.reads_dropped_pages) == (1, 2, 0)


class Asked:
    """The store, with the keys that it is asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.lookups: list[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def lookup(self, keys: list[str]) -> Any:
        self.lookups.append(keys)
        return self._store.lookup(keys)


def test_arrive_when_the_node_holds_the_beginning_then_the_store_is_asked_once_and_read_behind_it(
    host: StoreHost,
) -> None:
    host.save([3, 4, 5], keys(1, 2, 3))
    host.lose()
    store = host.tier._store = host.prefetch._store = Asked(host.store)
    asked: list[tuple[int, int]] = []

    def worth(num_missing: int, stored: Run) -> int:
        asked.append((num_missing, stored.num_pages))
        return stored.num_pages

    for _ in range(2):
        host.tier.ask(Wanted("r", keys(1, 2, 3, 4), 1, worth))
    assert store.lookups == 2 * [keys(1, 2, 3, 4)] and asked == [(3, 2)]
    host.until(lambda: host.residency.num_resident == 2)
    assert host.residency.frame(*keys(1)) is None and host.residency.frame(*keys(3)) is not None


def test_arrive_when_the_node_holds_more_than_the_store_then_nothing_is_read(host: StoreHost) -> None:
    host.save([3], keys(1))
    host.tier.ask(Wanted("r", keys(1, 2, 3), 2, whole))
    assert host.counters.reads == 0


def test_offer_when_the_node_holds_the_beginning_then_the_store_supplies_the_rest(host: StoreHost) -> None:
    before = [host.rank.pages(frame) for frame in (3, 4, 5)]
    host.save([3, 4, 5], keys(1, 2, 3))
    host.rank.frame_table.reset()
    # The page furthest from the root goes first.
    host.residency.abandon(host.residency.claim(host.residency.num_frames - host.residency.num_resident + 1))
    assert host.residency.frame(*keys(3)) is None and host.residency.frame(*keys(2)) is not None
    assert host.fetch(keys(1, 2, 3), frames(9, 1, 7)) == (Run(SourceKind.HOST, 2), Run(SourceKind.STORE, 1))
    assert [host.rank.pages(frame) for frame in (9, 1, 7)] == before


def test_two_requests_when_they_want_the_same_read_then_both_follow_it(host: StoreHost) -> None:
    before = [host.rank.pages(frame) for frame in (3, 4)]
    host.save([3, 4], keys(1, 2))
    host.lose()
    for rid, targets in (("a", (6, 7)), ("b", (8, 9))):
        assert host.cache.prepare(request(rid), keys(1, 2)).num_pages
        assert host.cache.admit(rid, keys(1, 2), frames(*targets)) is not None
    assert host.cache.finish(host.cache.start())
    assert host.counters.reads == 1
    assert [host.rank.pages(frame) for frame in (6, 7)] == before == [host.rank.pages(frame) for frame in (8, 9)]


def test_finish_when_a_record_is_damaged_then_the_batch_fails_and_the_page_is_never_offered_again(
    host: StoreHost, tmp_path: Path
) -> None:
    host.save([3, 4, 5], keys(1, 2, 3))
    host.lose()
    second_layer = host.rank.page(4, 1)
    (segment,) = [path for path in tmp_path.rglob("*") if path.is_file() and second_layer in path.read_bytes()]
    content = bytearray(segment.read_bytes())
    content[content.index(second_layer)] ^= 1
    segment.write_bytes(content)
    assert host.cache.prepare(request("r"), keys(1, 2, 3)).num_pages
    assert host.cache.admit("r", keys(1, 2, 3), frames(9, 1, 7)) is not None
    assert not host.cache.finish(host.cache.start())
    host.until(lambda: host.residency.num_filling == 0)
    assert host.counters.read_failed_pages == 1
    assert host.cache.prepare(request("again"), keys(1, 2, 3)).num_pages == 1


class HungStore:
    """A drive that hangs at the first read: it is late after a while, and ends later."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_hung = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def lookup(self, keys: list[str]) -> Found:
        return self._store.lookup([] if self._is_hung else keys)

    def read(self, found: Found, num_pages: int, memory: Any, offsets: Any, *, layers_per_step: int) -> Read:
        feed = Feed(memory, offsets, BLOCK.frame_bytes, len(BLOCK.layer_bytes))
        self._is_hung = True
        Timer(0.1, feed.be_late).start()
        Timer(0.5, feed.end).start()
        return feed.read()


def test_finish_when_the_drive_hangs_then_the_batch_fails_and_the_frames_wait_for_the_drive(host: StoreHost) -> None:
    host.save([3, 4], keys(1, 2))
    host.lose()
    host.prefetch._store = HungStore(host.store)  # type: ignore[assignment]
    assert host.cache.prepare(request("r"), keys(1, 2)).num_pages
    assert host.cache.admit("r", keys(1, 2), frames(9, 1)) is not None
    assert not host.cache.finish(host.cache.start())
    assert host.cache.prepare(request("meanwhile"), keys(1, 2)).num_pages == 0
    host.prefetch.poll()
    assert host.residency.num_filling == host.prefetch.num_reading == 2
    host.until(lambda: host.residency.num_filling == 0)
    assert host.prefetch.num_reading == 0
    assert host.counters.read_failed_pages == 2 and host.residency.num_resident == 0


class FakeRead:
    """A read under way that counts how often it is asked whether it is late. It ends when it is told to."""

    has_ended = False
    num_asked = 0

    @property
    def is_late(self) -> bool:
        self.num_asked += 1
        return False

    def failed_pages(self) -> list[int]:
        assert self.has_ended, "it is waited for"
        return [0]


def test_arriving_when_one_read_brings_thousands_of_pages_then_it_is_asked_once_and_makes_one_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, read, runs = keys(*range(4096)), FakeRead(), []
    host = Host(RankTable.create(4), 0, num_frames=4096)
    prefetch = make_prefetch(host, None, max_pages=4096)
    prefetch.start_pull(names, whole, NodeFound("there", 0, names), lambda *_: read, "there")
    monkeypatch.setattr(prefetch_module, "Run", lambda *run: runs.append(Run(*run)) or runs[-1])
    assert prefetch.arriving([*names, *keys(4096)]) == [Run(SourceKind.REMOTE, 4096, "there")]
    assert (len(runs), read.num_asked) == (1, 1)


def test_finish_when_all_layers_are_through_then_the_end_of_the_read_is_not_waited_for(host: StoreHost) -> None:
    """Another writer has taken a page away: what he has announced since is looked at first."""
    feeds: list[Feed] = []

    def pull(found: Any, num_pages: int, memory: Any, offsets: Any) -> Any:
        feeds.append(Feed(memory, offsets, BLOCK.frame_bytes, len(BLOCK.layer_bytes)))
        return feeds[0].read()

    found = NodeFound("there", 0, keys(1, 2))
    host.prefetch.start_pull(keys(1, 2), whole, found, pull, found.origin)
    assert host.cache.prepare(request("r"), keys(1, 2)).num_pages == 2
    assert host.cache.admit("r", keys(1, 2), frames(9, 1)) is not None
    for failed in ([], [1], []):
        feeds[0].land(2 * LAYER_BYTES, failed)
    assert not host.cache.finish(host.cache.start())
    assert host.prefetch.num_arriving(keys(1, 2)) == 1, "what is lost is not tried again and again"
    feeds[0].end()
    host.until(lambda: host.residency.num_filling == 0)
    assert host.residency.num_resident == 1


@pytest.mark.parametrize("has_ended", [False, True])
def test_finish_when_the_batch_was_given_up_then_no_read_is_waited_for_and_of_ended_ones_the_failures_are_known(
    host: StoreHost, has_ended: bool
) -> None:
    host.save([3], keys(1))
    read = FakeRead()
    host.prefetch.start_pull(keys(2), whole, NodeFound("there", 0, keys(2)), lambda *_: read, "there")
    assert host.cache.prepare(request("r"), keys(1, 2)).num_pages == 2
    assert host.cache.admit("r", keys(1, 2), frames(9, 1)) is not None
    assert host.cache.give_up() == 1
    read.has_ended = has_ended
    assert not host.cache.finish(host.cache.start())
    assert host.prefetch.num_arriving(keys(2)) == (0 if has_ended else 1)


class LaggingPeers:
    """Peers whose copies go on after ``finish``, as those of a GPU do, until they are let go."""

    def __init__(self, peers: Any) -> None:
        self._peers = peers
        self.copies: list[LaggingCopy] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._peers, name)

    def start_copy(self, *loads: Any) -> LaggingCopy:
        self.copies.append(LaggingCopy(self._peers.start_copy(*loads)))
        return self.copies[-1]


class LaggingCopy:
    has_ended = False

    def __init__(self, copy: Any) -> None:
        self._copy = copy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copy, name)


def test_finish_when_the_copy_goes_on_then_what_it_follows_is_let_go_when_it_has_ended(host: StoreHost) -> None:
    host.save([3, 4], keys(1, 2))
    host.lose()
    lagging = host.cache._full.supply.peers = LaggingPeers(host.rank.peers)
    assert host.cache.prepare(request("r"), keys(1, 2)).num_pages
    assert host.cache.admit("r", keys(1, 2), frames(6, 7)) is not None
    assert host.cache.finish(host.cache.start())
    host.cache.poll()
    host.prefetch.poll()
    assert host.residency.num_filling == 2 and host.residency.num_resident == 0
    lagging.copies[0].has_ended = True
    host.cache.poll()
    host.until(lambda: host.residency.num_filling == 0)
    assert host.residency.num_resident == 2


def test_cancel_when_a_fetch_follows_a_read_then_the_read_still_lands(host: StoreHost) -> None:
    host.save([3, 4], keys(1, 2))
    host.lose()
    assert host.cache.prepare(request("r"), keys(1, 2)).num_pages
    assert host.cache.admit("r", keys(1, 2), frames(6, 7)) is not None
    assert host.cache.cancel("r")
    host.until(lambda: host.residency.num_resident == 2)


def test_quiesce_when_reads_are_under_way_then_their_frames_are_free(host: StoreHost) -> None:
    host.save([3, 4], keys(1, 2))
    host.lose()
    host.prefetch.start_reads(keys(1, 2), whole)
    host.cache.quiesce()
    host.prefetch.quiesce()
    assert host.residency.num_filling == 0 and host.prefetch.num_arriving(keys(1)) == 0


def test_quiesce_when_the_drive_hangs_then_nobody_waits_for_it_and_the_frames_come_back_later(host: StoreHost) -> None:
    host.save([3, 4], keys(1, 2))
    host.lose()
    host.prefetch._store = HungStore(host.store)  # type: ignore[assignment]
    host.prefetch.start_reads(keys(1, 2), whole)
    started_s = time.monotonic()
    host.prefetch.quiesce()
    waited_s = time.monotonic() - started_s
    assert host.prefetch.num_left_behind == 1 and host.prefetch.num_arriving(keys(1)) == 0
    assert host.residency.num_filling == 2 and host.residency.claim(8) not in ([], None)
    host.residency.reset()
    host.until(lambda: host.prefetch.num_left_behind == 0)
    assert waited_s < time.monotonic() - started_s, "it waited for the drive"
    assert host.residency.num_free == 2


class SilentStore:
    """Takes what it is given, and never gets it done."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.asked_s: list[float | None] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def sync(self, within_s: float | None = None) -> int:
        self.asked_s.append(within_s)
        raise TimeoutError("it does not answer")

    def completed(self) -> list[tuple[str, str]]:
        return []


class QueueingStore:
    """Takes every page, and tells when it is let."""

    def __init__(self) -> None:
        self.over: list[tuple[str, str]] = []

    def put(self, keys: list[str], parent: str | None, memory: object, offsets: object) -> list[str]:
        return ["queued"] * len(keys)

    def completed(self) -> list[tuple[str, str]]:
        over, self.over = self.over, []
        return over


def test_write_when_the_same_page_is_queued_twice_then_each_end_lets_one_frame_go(host: StoreHost) -> None:
    archive = host.tier._archive
    archive._store = store = QueueingStore()  # type: ignore[assignment]
    (frame,) = host.residency.claim(1)
    host.residency.publish([frame], keys(1))
    host.tier.learn([keys(1)])
    archive._put(keys(1), None)
    archive._put(keys(1), None)
    (name,) = keys(1)
    store.over = [(name, "failed")]
    archive.poll()
    assert archive.num_left_behind == 1 and host.residency._holds[frame] == 1
    store.over = [(name, "stored")]
    archive.poll()
    assert archive.num_left_behind == 0 and not host.residency._holds


def test_quiesce_when_the_store_does_not_take_what_it_has_then_its_frames_stay_lent_through_a_reset(
    host: StoreHost, caplog: pytest.LogCaptureFixture
) -> None:
    silent = SilentStore(host.store)
    archive = host.tier._archive
    archive._store = silent
    host.tier.learn([keys(1, 2)])
    host.rank.frame_table.publish(frames(3, 4), keys(1, 2))
    host.backup.offer(keys(1, 2))
    for landed in host.wait_landed():
        host.tier.landed(landed.keys)
    assert host.num_writing == 2
    num_frames = host.residency.num_frames
    host.tier.quiesce()
    assert silent.asked_s[0] is not None and "--banyan-store" in caplog.text
    host.residency.reset()
    assert host.residency.num_free == num_frames - 2, "the drive still reads them"
    archive._store = host.store
    host.until(lambda: host.num_writing == 0)
    assert host.residency.num_free == num_frames


def test_access_when_pages_are_admitted_at_the_second_access_then_the_first_writes_nothing(tmp_path: Path) -> None:
    host = StoreHost(RankTable.create(4), 0, tmp_path, admission=Admission.SECOND_ACCESS)
    host.save([3, 4], keys(1, 2))
    assert host.counters.archived_pages == 0
    host.tier.landed(keys(1, 2))
    host.until(lambda: host.counters.archived_pages == 2)
    host.store.close()


def test_access_when_the_parent_is_unknown_then_nothing_is_written(host: StoreHost) -> None:
    host.rank.frame_table.publish(frames(3), keys(1))
    host.backup.offer(keys(1))
    for landed in host.wait_landed():
        host.tier.landed(landed.keys)
    assert host.num_writing == 0 and host.counters.archive_refused_pages == 1


def test_landed_when_the_store_lacks_the_parent_then_the_chain_is_handed_out_and_written_when_it_has_it(
    host: StoreHost,
) -> None:
    host.save([3], keys(1))
    assert host.store.evict(10) == 1
    orphans: list[list[str]] = []
    host.tier._orphaned = lambda chain: orphans.append(list(chain))
    host.rank.frame_table.publish(frames(4), keys(2))
    host.tier.learn([keys(1, 2)])
    host.backup.offer(keys(2))
    for landed in host.wait_landed():
        host.tier.landed(landed.keys)
    assert orphans == [keys(2)] and list(host.tier.offer_again(keys(2))) == keys(2)
    assert (host.num_writing, host.counters.archive_refused_pages) == (0, 0)
    host.tier.landed(keys(1))
    assert list(host.tier.offer_again(keys(2))) == []
    host.until(lambda: host.store.lookup(keys(1, 2)).num_pages == 2)


def test_landed_when_nobody_else_could_write_the_parent_then_the_page_counts_as_refused(host: StoreHost) -> None:
    host.save([3], keys(1))
    assert host.store.evict(10) == 1
    host.tier.learn([keys(1, 2)])
    host.rank.frame_table.publish(frames(4), keys(2))
    host.backup.offer(keys(2))
    for landed in host.wait_landed():
        host.tier.landed(landed.keys)
    assert (host.num_writing, host.counters.archive_refused_pages) == (0, 1)


def test_look_again_when_others_have_announced_pages_then_they_are_read_for_a_prompt_that_came_before(
    tmp_path: Path,
) -> None:
    one, two = (StoreHost(RankTable.create(4), 0, tmp_path) for _ in range(2))
    two.tier.ask(Wanted("r", keys(1, 2, 3), 0, whole))
    news = two.tier.take_news()
    one.save([3, 4], keys(1, 2))
    two.until(lambda: two.tier.take_news() != news and two.store.lookup(keys(1, 2)).num_pages == 2)
    two.tier.start_read(Wanted("r", keys(1, 2, 3), 0, whole))
    two.until(lambda: two.residency.num_resident == 2)
    for server in (one, two):
        server.store.close()


def test_two_servers_when_they_share_a_path_then_a_page_is_written_once_and_read_by_both(tmp_path: Path) -> None:
    one, two = (StoreHost(RankTable.create(4), 0, tmp_path) for _ in range(2))
    before = [one.rank.pages(frame) for frame in (3, 4)]
    one.save([3, 4], keys(1, 2))
    two.until(lambda: two.store.lookup(keys(1, 2)).num_pages == 2)
    two.save([3, 4], keys(1, 2))
    assert one.counters.archived_pages == 2 and two.counters.archived_pages == 0
    two.lose()
    assert two.fetch(keys(1, 2), frames(8, 9)) == (Run(SourceKind.STORE, 2),)
    assert [two.rank.pages(frame) for frame in (8, 9)] == before
    for server in (one, two):
        server.store.close()
