# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed with -9 at the worst moment: the others go on, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import numpy as np
import pytest
from kill_worker import NUM_FRAMES, content, rank
from processes import Process, frames, ids, key

from banyan._native import RankTable

WORKER = Path(__file__).with_name("kill_worker.py")
NUM_PAGES = 16

pytestmark = pytest.mark.native


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """Once a test has let go of its objects: no descriptor or mapping of ours, and no named shared memory."""
    gc.collect()
    shm_before, ours_before = named(), ours()
    yield
    gc.collect()
    assert ours() == ours_before
    assert named() == shm_before


def named() -> list[str]:
    """Other programs have theirs, and stores of tests that run beside these a file each."""
    names = (name for name in os.listdir("/dev/shm") if "banyan" in name)
    return sorted(name for name in names if not name.startswith("banyan-traffic-"))


def ours() -> list[str]:
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    with open("/proc/self/maps") as maps:
        targets += [line.split(maxsplit=5)[-1].strip() for line in maps]
    return sorted(target for target in targets if "memfd:banyan" in target)


def until(condition, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def keys(numbers) -> list[str]:
    return [key(number) for number in numbers]


def test_reader_when_killed_mid_copy_then_its_frames_come_back() -> None:
    rank_table = RankTable.create(3)
    _pool, frame_table, _peers = rank(rank_table, 0)
    frame_table.publish(frames(range(NUM_PAGES)), keys(range(NUM_PAGES)))
    reader = Process(WORKER, "reader", rank_table.path, 1, NUM_PAGES)
    reader.expect("leased")
    assert ids(frame_table.retire(frames(range(NUM_PAGES)))) == []
    assert ids(frame_table.drain()) == [], "the reader lives and holds them"
    reader.kill()
    came_back: list[int] = []
    assert until(lambda: came_back.extend(ids(frame_table.drain())) or len(came_back) == NUM_PAGES)
    assert sorted(came_back) == list(range(NUM_PAGES))
    assert frame_table.num_quarantined == 0
    assert frame_table.publish(frames(range(NUM_PAGES)), keys(range(NUM_PAGES))) == NUM_PAGES


def test_reader_when_killed_and_not_reaped_then_its_frames_come_back() -> None:
    rank_table = RankTable.create(3)
    _pool, frame_table, _peers = rank(rank_table, 0)
    frame_table.publish(frames([0, 1]), keys([0, 1]))
    reader = Process(WORKER, "reader", rank_table.path, 1, 2)
    reader.expect("leased")
    assert ids(frame_table.retire(frames([0, 1]))) == []
    reader.popen.kill()
    came_back: list[int] = []
    assert until(lambda: came_back.extend(ids(frame_table.drain())) or len(came_back) == 2)
    reader.close()


def test_reader_when_its_successor_takes_its_place_then_old_pins_are_gone() -> None:
    rank_table = RankTable.create(3)
    _pool, frame_table, _peers = rank(rank_table, 0)
    frame_table.publish(frames(range(4)), keys(range(4)))
    first = Process(WORKER, "reader", rank_table.path, 1, 4)
    first.expect("leased")
    first.kill()
    # The successor has the same slot and reader bit, and leases other pages than the dead one did.
    second = Process(WORKER, "reader", rank_table.path, 1, 1)
    second.expect("leased")
    came_back = ids(frame_table.retire(frames(range(4))))
    assert until(lambda: came_back.extend(ids(frame_table.drain())) or len(came_back) == 3)
    assert sorted(came_back) == [1, 2, 3]
    second.kill()
    assert until(lambda: ids(frame_table.drain()) == [0])


@pytest.mark.parametrize("is_withdrawn", [False, True], ids=["still published", "in quarantine"])
def test_reader_when_its_successor_is_in_another_namespace_then_old_pins_are_gone_all_the_same(is_withdrawn) -> None:
    rank_table = RankTable.create(3)
    _pool, frame_table, _peers = rank(rank_table, 0)
    frame_table.publish(frames(range(4)), keys(range(4)))
    first = Process(WORKER, "reader", rank_table.path, 1, 4)
    first.expect("leased")
    came_back = ids(frame_table.retire(frames(range(4)))) if is_withdrawn else []
    first.kill()
    second = Process(WORKER, "stranger", rank_table.path, 1, 0)
    second.expect("there")
    if not is_withdrawn:
        came_back = ids(frame_table.retire(frames(range(4))))
    assert until(lambda: came_back.extend(ids(frame_table.drain())) or len(came_back) == 4)
    second.kill()


def test_owner_when_killed_mid_publish_then_readers_go_on_with_others() -> None:
    rank_table = RankTable.create(3)
    pool, frame_table, peers = rank(rank_table, 0)
    victim = Process(WORKER, "owner", rank_table.path, 1, NUM_PAGES)
    victim.expect("published")
    survivor = Process(WORKER, "owner", rank_table.path, 2, 2)
    survivor.expect("published")
    assert peers.lookup(keys(range(NUM_PAGES))).runs == [(1, NUM_PAGES)]
    found = peers.lookup(keys(range(NUM_PAGES)))
    lease = peers.lease(found, keys(range(NUM_PAGES)))
    version = peers.version()
    victim.kill()

    assert until(lambda: peers.lookup(keys(range(NUM_PAGES))).runs == [(2, 2)], 1.0)
    assert peers.lease(found, keys(range(NUM_PAGES))) is None, "no new lease on a dead rank"
    assert peers.holders(keys(range(NUM_PAGES))[:1], [1, 2]) == [2]
    assert peers.holders(keys(range(NUM_PAGES))[-1:], [1, 2]) == [None]
    assert peers.prefix_lens(keys(range(NUM_PAGES))) == [0, 0, 2]
    assert peers.version() != version
    assert [(member["slot"], member["alive"]) for member in rank_table.members()] == [(0, True), (1, False), (2, True)]
    assert rank_table.members()[1]["num_published"] == 0

    both = [(lease, frames(range(NUM_PAGES)))]
    live = peers.lookup(keys(range(2)))
    both.append((peers.lease(live, keys(range(2))), frames([40, 41])))
    copy = peers.start_copy(both)
    assert copy.finish()
    for frame in range(NUM_PAGES):
        assert (pool.pages[:, frame] == content(1, frame)).all(), "memory of the dead rank, mapped while leased"
    assert (pool.pages[:, 40] == content(2, 0)).all()
    survivor.kill()
    frame_table.close()


def test_owner_when_killed_then_its_slot_can_be_taken_again() -> None:
    rank_table = RankTable.create(3)
    _pool, _frame_table, peers = rank(rank_table, 0)
    for _ in range(3):
        owner = Process(WORKER, "owner", rank_table.path, 1, 3)
        owner.expect("published")
        assert until(lambda: peers.lookup(keys(range(3))).runs == [(1, 3)])
        owner.kill()
        assert until(lambda: peers.lookup(keys(range(3))).num_pages == 0)
    assert np.array_equal(peers.prefix_lens(keys(range(3))), [0, 0, 0])
    assert NUM_FRAMES > NUM_PAGES
