# SPDX-License-Identifier: Apache-2.0
"""An owner that recycles its tiny pool without pause, two readers that copy from it: a million pages, not one torn."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from processes import Process
from race_worker import NUM_LAYERS, PAGE_BYTES, POSITIONS, num_torn

from banyan._native import RankTable

WORKER = Path(__file__).with_name("race_worker.py")
NUM_COPIES = 1_000_000

pytestmark = pytest.mark.native


def test_pages_when_the_owner_recycles_without_pause_then_never_torn() -> None:
    rank_table = RankTable.create(3)
    owner = Process(WORKER, "owner", rank_table.path)
    owner.expect("ready")
    readers = [Process(WORKER, "reader", rank_table.path, slot, NUM_COPIES // 2) for slot in (1, 2)]
    for reader in readers:
        reader.expect("ready")
    reports = [[int(number) for number in reader.expect("done")] for reader in readers]
    owner.tell("stop")
    num_rewritten, num_quarantined = map(int, owner.expect("done"))
    for process in (owner, *readers):
        process.close()
    print(f"copied, missed, torn: {reports}; rewritten {num_rewritten}, rounds with quarantine {num_quarantined}")
    assert sum(copied for copied, _, _ in reports) >= NUM_COPIES
    assert [torn for _, _, torn in reports] == [0, 0]
    # Or there was no race to win.
    assert num_rewritten > 10_000
    assert num_quarantined > 100
    assert all(missed > 100 for _, missed, _ in reports)


def test_pages_when_read_without_a_lease_then_some_are_torn() -> None:
    """The canary: with this owner a reader that does not lease does see torn pages, and the check sees that."""
    rank_table = RankTable.create(3)
    owner = Process(WORKER, "owner", rank_table.path)
    owner.expect("ready")
    peeker = Process(WORKER, "peek", pool_of(owner.popen.pid), 60)
    copied, torn = map(int, peeker.expect("done"))
    owner.tell("stop")
    owner.expect("done")
    for process in (owner, peeker):
        process.close()
    print(f"without leases torn: {torn} of {copied} pages")
    assert torn > 0


def pool_of(pid: int) -> str:
    paths = [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    (pool,) = [path for path in paths if "memfd:banyan-race-owner" in os.readlink(path)]
    return pool


@pytest.mark.parametrize(("extent", "page", "word"), [(0, 0, 0), (3, 1, 5), (1, 2, 127)])
def test_check_when_one_word_is_foreign_then_counted_as_torn(extent: int, page: int, word: int) -> None:
    numbers = np.array([5, 6, 7], dtype=np.uint64)
    tags = numbers * np.uint64(1 << 40) + np.uint64(9 << 20)
    pages = np.broadcast_to(tags[None, :, None] + POSITIONS, (2 * NUM_LAYERS, 3, PAGE_BYTES // 8)).copy()
    assert num_torn(pages, numbers) == 0
    pages[extent, page, word] += np.uint64(1 << 20)
    assert num_torn(pages, numbers) == 1
