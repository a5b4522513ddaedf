# SPDX-License-Identifier: Apache-2.0
"""What a page that is written costs, with a store that is played."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test.unit.directory.rig import keys

from banyan.arena.archive import Archive
from banyan.arena.lineage import Lineage
from banyan.arena.owners import Owners
from banyan.pacing.admission import Admission, WriteAdmission
from banyan.pacing.allowance import Allowance
from banyan.telemetry import Counters

RECORD_BYTES = 100


def archive_of(store, lineage, held):
    """With a budget of one page."""
    return Archive(
        store=store,
        residency=SimpleNamespace(frame=lambda key: 3, hold=held.extend, unhold=lambda frames: held.remove(*frames)),
        lineage=lineage,
        owners=Owners(),
        admission=WriteAdmission(Admission.SECOND_ACCESS, budget=Allowance(per_s=1e-5, burst=RECORD_BYTES, now_s=0.0)),
        memory=None,
        frame_bytes=RECORD_BYTES,
        record_bytes=RECORD_BYTES,
        counters=Counters(),
        clock=lambda: 0,
    )


def test_page_when_nobody_knows_the_one_before_it_then_it_costs_nothing_and_is_written_once_somebody_does():
    put, lineage = [], Lineage()
    store = SimpleNamespace(put=lambda names, *args: put.append(names) or ["queued"] * len(names))
    archive = archive_of(store, lineage, [])
    for _ in range(3):
        archive.note_access(keys(1), 0)
    assert not put and archive._counters.archive_refused_pages == 2
    lineage.learn(keys(1))
    archive.note_access(keys(1), 0)
    assert put == [keys(1)] and archive._counters.archive_over_budget_pages == 0


@pytest.mark.parametrize(
    ("answer", "outcome", "num_put"),
    [
        ("queued", "failed", [1, 2, 2]),
        ("queued", "stored", [1, 1, 1]),
        ("queued", "present", [1, 1, 2]),
        ("present", None, [1, 1, 2]),
        ("elsewhere", None, [1, 1, 2]),
    ],
)
def test_page_when_its_write_failed_or_was_none_then_it_has_its_bytes_again_and_its_access_where_it_failed(
    answer, outcome, num_put
):
    put, held = [], []
    store = SimpleNamespace(
        put=lambda names, *args: put.append(names) or [answer] * len(names),
        completed=lambda: [(name, outcome) for name in put[-1]] if outcome else [],
    )
    lineage = Lineage()
    lineage.learn(keys(1))
    archive = archive_of(store, lineage, held)
    archive.note_access(keys(1), 0)
    seen = []
    for _ in range(3):
        archive.note_access(keys(1), 0)
        seen.append(len(put))
        if len(put) == 1:
            archive.poll()
    assert archive._counters.archive_over_budget_pages == (outcome == "stored")
    assert seen == num_put and len(held) == (outcome is not None) * (len(put) - 1)
