# SPDX-License-Identifier: Apache-2.0
"""Pools that are described instead of mapped: found and leased as any other, copied by somebody else."""

import ctypes

import pytest
from test.unit.directory.rig import NAMESPACE, NUM_FRAMES, NUM_LAYERS, PAGE_BYTES, Rank, frames, geometry, ids, keys

from banyan._native import DevicePool, FrameTable, Peers, RankTable

NUM_BYTES = 2 * NUM_LAYERS * NUM_FRAMES * PAGE_BYTES


class DeviceRank:
    def __init__(self, rank_table, slot, description=b"how to open it"):
        pool = DevicePool(description, NUM_BYTES)
        self.frame_table = FrameTable(rank_table, slot, NAMESPACE, pool, NUM_FRAMES, geometry())
        self.peers = Peers(rank_table, slot, slot, NAMESPACE, geometry(), pool)


@pytest.fixture
def node():
    rank_table = RankTable.create(3)
    return rank_table, [DeviceRank(rank_table, slot, f"rank {slot}".encode()) for slot in range(2)]


def test_lease_when_the_pool_is_described_then_it_names_slot_epoch_and_frames(node):
    _, (owner, reader) = node
    owner.frame_table.publish(frames(5, 3), keys(1, 2))
    lease = reader.peers.lease(reader.peers.lookup(keys(1, 2)), keys(1, 2))
    ((slot, epoch, held),) = lease.sources()
    assert (slot, ids(held)) == (0, [5, 3])
    assert (slot, epoch) in reader.peers.present()
    assert reader.peers.description(slot, epoch) == b"rank 0"
    assert ids(owner.frame_table.retire(frames(5, 3))) == []
    lease.release()
    assert sorted(ids(owner.frame_table.drain())) == [3, 5]
    with pytest.raises(ValueError, match="released"):
        lease.sources()


def test_start_copy_when_the_pool_is_described_then_it_is_refused(node):
    _, (owner, reader) = node
    owner.frame_table.publish(frames(5), keys(1))
    lease = reader.peers.lease(reader.peers.lookup(keys(1)), keys(1))
    with pytest.raises(ValueError, match="described"):
        reader.peers.start_copy([(lease, frames(0))])


def test_description_when_the_rank_left_then_none(node):
    _, (owner, reader) = node
    ((slot, epoch),) = reader.peers.present()
    owner.frame_table.close()
    assert reader.peers.present() == []
    assert reader.peers.description(slot, epoch) is None


def test_pools_when_one_is_described_then_it_is_leased_but_not_copied_here(node):
    rank_table, (owner, _) = node
    mapped = Rank(rank_table, 2)
    owner.frame_table.publish(frames(5), keys(1))
    lease = mapped.peers.lease(mapped.peers.lookup(keys(1)), keys(1))
    with pytest.raises(ValueError, match="described"):
        mapped.peers.start_copy([(lease, frames(0))])


def test_mapping_when_the_peer_is_mapped_then_its_bytes_are_found_there(node):
    rank_table, (_, reader) = node
    mapped = Rank(rank_table, 2)
    mapped.frame_table.publish(frames(5), keys(7))
    ((slot, epoch, _),) = reader.peers.lease(reader.peers.lookup(keys(7)), keys(7)).sources()
    memory = reader.peers.mapping(slot, epoch)
    assert memory.num_bytes == mapped.pool.num_bytes and len(memory.extents) == 2 * NUM_LAYERS
    base, stride = memory.extents[3]
    mapped.frame_table.close()
    reader.peers.version()
    assert ctypes.string_at(memory.address + base + 5 * stride, PAGE_BYTES) == mapped.page(5, 1)[PAGE_BYTES:]
    assert reader.peers.description(slot, epoch) is None
    assert reader.peers.mapping(0, 99) is None


def test_memory_when_it_is_kept_mapped_then_its_reader_can_look_again_and_only_the_new_view_leases(node):
    """A weight update: the peer's memory stays pinned for a while, and the view of the old pages goes."""
    rank_table, (_, reader) = node
    mapped = Rank(rank_table, 2)
    mapped.frame_table.publish(frames(5), keys(7))
    lease = reader.peers.lease(reader.peers.lookup(keys(7)), keys(7))
    ((slot, epoch, _),) = lease.sources()
    memory = reader.peers.mapping(slot, epoch)

    def look_again():
        return Peers(rank_table, 1, 1, NAMESPACE, geometry(), DevicePool(b"pool 1", NUM_BYTES))

    reader.peers = None
    with pytest.raises(ValueError, match="in use"):
        look_again()
    lease.release()
    del lease
    again = look_again()
    taken = again.lease(again.lookup(keys(7)), keys(7))
    assert taken.num_pages == 1 and memory.num_bytes == mapped.pool.num_bytes


def test_device_pool_when_the_geometry_does_not_fit_then_refused():
    pool = DevicePool(b"small", NUM_BYTES - 1)
    with pytest.raises(ValueError, match="room for"):
        FrameTable(RankTable.create(1), 0, NAMESPACE, pool, NUM_FRAMES, geometry())
