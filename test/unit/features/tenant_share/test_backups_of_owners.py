# SPDX-License-Identifier: Apache-2.0
"""Pages on their way down where each tenant has a share of the arena."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from test.unit.arena.test_backup import LAYOUT, Host
from test.unit.directory.rig import frames, keys

from banyan._native import FrameTable, RankTable
from banyan.arena import backup
from banyan.features.tenant_share.shared_residency import SharedResidency

OF_A = keys(0, 1, 2, 3, 4)


def owner_of(chain: Sequence[str]) -> str:
    return "a" if chain[0] in OF_A else "b"


def shared(frame_table: FrameTable, num_frames: int) -> SharedResidency:
    return SharedResidency(frame_table, num_frames, (), share=0.5, owner_of=owner_of)


@pytest.fixture
def full() -> Host:
    """Both have their share of the arena, and those of one are held."""
    host = Host(RankTable.create(2 * LAYOUT.num_ranks), 0, num_frames=4, make_residency=shared)
    host.rank.frame_table.publish(frames(*range(8)), keys(*range(8)))
    for chain in (keys(0, 1), keys(5, 6)):
        host.backup.offer(chain)
        host.wait_landed()
    residency = host.residency
    residency.hold([frame for key in keys(0, 1) if (frame := residency.frame(key)) is not None])
    return host


def test_backup_when_there_is_no_frame_for_one_tenant_then_the_pages_of_others_go_down(
    full: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = []
    claim = full.residency.claim
    monkeypatch.setattr(
        full.residency, "claim", lambda num, behind, names: claimed.append(names) or claim(num, behind, names)
    )
    for number in (2, 3, 4, 7):
        full.backup.offer(keys(number))
    assert [landed.keys for landed in full.wait_landed()] == [keys(7)]
    assert claimed[:2] == [keys(2), keys(7)], "one look claims once for each of them"


def test_backup_when_many_chains_wait_for_a_frame_then_a_look_passes_over_so_many_and_the_next_goes_on(
    full: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "MOST_PASSED_OVER", 1)
    for number in (2, 3, 4, 7):
        full.backup.offer(keys(number))
    assert not full.wait_landed(), "it is behind more than that"
    full.backup.offer(keys(4))
    assert [landed.keys for landed in full.wait_landed()] == [keys(7)]


def test_backup_when_as_many_tenants_as_may_be_tried_find_no_frame_then_the_look_ends(
    full: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "MOST_WITHOUT_FRAMES", 1)
    for number in (2, 7):
        full.backup.offer(keys(number))
    assert not full.wait_landed()
    full.backup.offer(keys(3))
    assert [landed.keys for landed in full.wait_landed()] == [keys(7)], "the next one begins behind it"
