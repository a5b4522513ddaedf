# SPDX-License-Identifier: Apache-2.0
"""Fetching from peers on a GPU: what is leased, what is refused, and what becomes of it when something fails."""

import time

import pytest
from test.unit.directory.rig import NAMESPACE, frames, ids, key
from test.unit.transport.fake_gpu import FakeGpu
from test.unit.transport.gpu_node import (
    EXTENTS,
    FRAME_BYTES,
    NUM_LAYERS,
    NUM_PAGES,
    PAGE_BYTES,
    GpuRank,
    make_node,
)

from banyan import _native


@pytest.fixture
def node():
    gpu, owner, reader = make_node()
    owner.publish([5, 6], [key(1), key(2)])
    return gpu, owner, reader


def fetch(reader, names, *pages):
    return reader.source.start_copy([(reader.lease(names), reader.targets(*pages))])


PATIENCE_S = 5.0


def drained(owner, num_pages):
    """What the owner gets back, once it is so many pages."""
    deadline_s, back = time.monotonic() + PATIENCE_S, []
    while len(back) < num_pages and time.monotonic() < deadline_s:
        back += ids(owner.frame_table.drain())
    return sorted(back)


def test_fetch_when_it_has_landed_then_every_extent_is_the_owners_and_its_pages_are_let_go_without_the_scheduler(node):
    gpu, owner, reader = node
    copy = fetch(reader, [key(1), key(2)], 3, 0)
    assert copy.bytes_fetched == 2 * EXTENTS * PAGE_BYTES
    assert ids(owner.frame_table.retire(frames(5, 6))) == []
    gpu.run()
    assert drained(owner, 2) == [5, 6], "nobody polls"
    for page, source in ((3, 5), (0, 6)):
        assert [reader.get(page, extent) for extent in range(EXTENTS)] == [
            owner.content(source, extent) for extent in range(EXTENTS)
        ]


def test_fetch_when_its_pages_are_still_being_copied_then_their_owner_does_not_get_them(node):
    gpu, owner, reader = node
    fetch(reader, [key(1)], 3)
    fetch(reader, [key(2)], 0)
    assert ids(owner.frame_table.retire(frames(5, 6))) == []
    while reader.driver.gpu.streams[reader.copy_stream]:
        landed = [
            reader.get(page, EXTENTS - 1) == owner.content(source, EXTENTS - 1) for page, source in ((3, 5), (0, 6))
        ]
        back = ids(owner.frame_table.drain())
        assert len(back) <= sum(landed), "let go before it was read"
        gpu.step()


def test_lease_when_the_word_behind_its_copy_is_refused_then_it_is_given_back_by_the_next_step(node):
    gpu, owner, reader = node
    reader.driver.refuse["write_word"] = 0
    assert not fetch(reader, [key(1)], 3).finish()
    assert ids(owner.frame_table.retire(frames(5))) == []
    gpu.run()
    reader.source.poll()
    assert ids(owner.frame_table.drain()) == [5]


def test_fetch_when_it_cannot_begin_then_its_pages_are_let_go_at_once(node):
    _, owner, reader = node
    lease = reader.lease([key(1)])
    reader.source._is_broken = True
    assert not reader.source.start_copy([(lease, reader.targets(3))]).finish()
    assert ids(owner.frame_table.retire(frames(5))) == [5]


def test_fetch_when_it_has_landed_then_the_device_says_how_long_it_took(node):
    gpu, _, reader = node
    gpu.run()
    copy = fetch(reader, [key(1)], 3)
    assert not copy.has_ended and copy.copy_s == 0
    gpu.run()
    assert copy.has_ended
    # The fake takes a microsecond for each operation: every page of every extent, and the events between.
    assert copy.copy_s == pytest.approx((EXTENTS + reader.source._groups.num_groups) / 1e6)


def test_batch_when_it_has_several_loads_then_one_launch_for_each_group_moves_all(node):
    gpu, owner, reader = node
    loads = [(reader.lease([key(n)]), reader.targets(page)) for n, page in ((2, 1), (1, 2))]
    reader.driver.calls.clear()
    reader.source.start_copy(loads)
    assert reader.driver.names().count("kernel") == reader.source._groups.num_groups
    gpu.run()
    assert reader.get(1, 0) == owner.content(6, 0) and reader.get(2, 0) == owner.content(5, 0)


def test_lease_when_released_without_a_copy_then_the_owner_is_free_again(node):
    _, owner, reader = node
    lease = reader.lease([key(1)])
    lease.release()
    lease.release()
    assert ids(owner.frame_table.retire(frames(5))) == [5]
    assert reader.source._num_leased == 0


def test_lease_when_more_pages_are_under_way_than_the_pool_has_then_refused(node):
    _, _, reader = node
    held = [reader.lease([key(1), key(2)]) for _ in range(NUM_PAGES // 2)]
    assert all(held)
    assert reader.lease([key(1)]) is None
    held[0].release()
    assert reader.lease([key(1)]) is not None


def test_lookup_when_the_peers_pool_is_being_opened_then_nothing_is_found_and_nobody_waits():
    gpu, rank_table = FakeGpu(), _native.RankTable.create(2)
    owner, reader = (GpuRank(gpu, rank_table, slot) for slot in (0, 1))
    owner.publish([5], [key(1)])
    reader.mappings.attend(reader.peers.present())
    before = reader.source.version()
    assert reader.source.lookup([key(1)]).num_pages == 0
    assert reader.source.lookup([key(1)], [0]).num_pages == 0
    assert reader.source.holders([key(1)], [0]) == [None]
    owner.frame_table.log_access(_native.page_numbers([key(1)]))
    assert len(reader.source.read_access_logs([0])) == 1, "what it is asked for can be heard all the same"
    reader.meet_peers()
    assert reader.source.version() != before, "an earlier answer is not to be kept"
    assert reader.source.lookup([key(1)], [0]).num_pages == 1
    assert reader.source.holders([key(1)], [0]) == [0]
    assert not reader.driver.slow_calls


def test_lookup_when_the_peers_pool_cannot_be_opened_then_others_hold_what_they_hold(caplog):
    gpu, rank_table = FakeGpu(), _native.RankTable.create(3)
    barred, owner, reader = (GpuRank(gpu, rank_table, slot) for slot in range(3))
    gpu.exported = {handle: base for handle, base in gpu.exported.items() if base not in barred.pools}
    barred.publish([1, 2, 3], [key(1), key(2), key(3)])
    owner.publish([5, 6], [key(1), key(2)])
    reader.meet_peers()
    reader.meet_peers()
    found = reader.source.lookup([key(1), key(2), key(3)], [0, 1])
    assert found.runs == [(1, 2)], "the longer run cannot be read"
    assert reader.source.lease(found, [key(1), key(2)]) is not None
    assert caplog.text.count("cannot be opened") == 1


@pytest.mark.parametrize("registers_read_only", [False, True])
def test_arena_part_of_a_peer_when_the_device_registers_only_what_can_be_written_then_it_is_read(registers_read_only):
    gpu, rank_table = FakeGpu(), _native.RankTable.create(2)
    gpu.registers_read_only = registers_read_only
    reader = GpuRank(gpu, rank_table, 1)
    arena = _native.SharedBytes.create(NUM_PAGES * FRAME_BYTES, "part")
    table = [[(extent * PAGE_BYTES, PAGE_BYTES) for extent in (2 * n, 2 * n + 1)] for n in range(NUM_LAYERS)]
    frame_table = _native.FrameTable(rank_table, 0, NAMESPACE, arena, NUM_PAGES, table, FRAME_BYTES)
    memoryview(arena).cast("B")[3 * FRAME_BYTES : 4 * FRAME_BYTES] = bytes(range(FRAME_BYTES))
    frame_table.publish(frames(3), [key(1)])
    reader.meet_peers()
    fetch(reader, [key(1)], 2)
    gpu.run()
    assert b"".join(reader.get(2, extent) for extent in range(EXTENTS)) == bytes(range(FRAME_BYTES))


def test_start_copy_when_a_call_is_refused_then_the_batch_fails_and_sharing_ends(node, caplog):
    gpu, owner, reader = node
    reader.driver.refuse["kernel"] = 1
    copy = fetch(reader, [key(1)], 3)
    reader.driver.calls.clear()
    assert not copy.finish()
    assert [call[1] for call in reader.driver.calls if call[0] == "wait_event"] == [reader.schedule, reader.forward]
    assert "sharing is off" in caplog.text
    assert ids(owner.frame_table.retire(frames(5))) == []
    gpu.run()
    reader.source.poll()
    assert ids(owner.frame_table.drain()) == [5]
    assert reader.lease([key(2)]) is None


def test_start_copy_when_no_call_works_any_more_then_the_lease_is_kept(node):
    gpu, owner, reader = node
    reader.driver.refuse.update(kernel=0, create_event=0)
    assert not fetch(reader, [key(1)], 3).finish()
    assert ids(owner.frame_table.retire(frames(5))) == []
    gpu.run()
    reader.source.poll()
    assert ids(owner.frame_table.drain()) == [], "nobody knows when the device ends"


def test_start_copy_when_frames_and_lease_differ_then_valueerror_and_nothing_is_enqueued(node):
    _, _, reader = node
    lease = reader.lease([key(1)])
    reader.driver.calls.clear()
    with pytest.raises(ValueError, match="2 frames for 1 pages"):
        reader.source.start_copy([(lease, reader.targets(1, 2))])
    assert not reader.driver.calls


def test_peer_when_the_owner_leaves_then_its_pool_is_closed_after_the_last_copy(node):
    gpu, owner, reader = node
    fetch(reader, [key(1)], 3)
    owner.frame_table.close()
    reader.meet_peers()
    assert reader.driver.mapped
    gpu.run()
    reader.source.poll()
    gpu.opener.run()
    assert not reader.driver.mapped and len(reader.mappings._open) == 0


def test_peer_when_the_owner_comes_back_then_its_new_pool_is_opened(node):
    gpu, owner, reader = node
    gpu.run_stream(reader.copy_stream)
    reader.lease([key(1)]).release()
    owner.frame_table.close()
    reader.meet_peers()
    gpu.opener.run()
    assert not reader.driver.mapped
    again = owner.announce()
    again.publish(frames(2), [key(9)])
    reader.meet_peers()
    fetch(reader, [key(9)], 1)
    gpu.run()
    assert reader.get(1, 4) == owner.content(2, 4)


def test_close_when_all_is_done_then_the_page_list_and_every_event_is_given_back(node):
    gpu, _, reader = node
    before = set(gpu.memory)
    fetch(reader, [key(1)], 3)
    gpu.run()
    reader.source.close()
    reader.mappings.close()
    gpu.opener.run()
    freed = before - set(gpu.memory)
    assert len(freed) == 2 and not reader.driver.mapped
    assert reader.driver.names().count("destroy_event") == reader.source._groups.num_groups + 2


def test_start_copy_when_frames_are_known_here_then_the_same_pages_move(node):
    gpu, owner, reader = node
    loads = [(reader.lease([key(1)]), frames(3)), (reader.lease([key(2)]), reader.targets(1))]
    reader.source.start_copy(loads)
    gpu.run()
    assert reader.get(3, 2) == owner.content(5, 2) and reader.get(1, 5) == owner.content(6, 5)
