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
from banyan.pacing.budget import WriteBudget
from banyan.telemetry import Counters

RECORD_BYTES = 100


@pytest.mark.parametrize(("outcome", "is_written_again"), [("failed", True), ("stored", False)])
def test_page_when_its_write_failed_then_it_has_its_bytes_and_its_access_again(outcome, is_written_again):
    written, held = [], []
    store = SimpleNamespace(
        put=lambda names, *args: written.append(names) or ["queued"] * len(names),
        completed=lambda: [(name, outcome) for name in written[-1]],
    )
    lineage = Lineage()
    lineage.learn(keys(1))
    archive = Archive(
        store=store,
        residency=SimpleNamespace(frame=lambda key: 3, hold=held.extend, unhold=lambda frames: held.remove(*frames)),
        lineage=lineage,
        owners=Owners(),
        admission=WriteAdmission(
            Admission.SECOND_ACCESS, budget=WriteBudget(bytes_per_day=1, burst_bytes=RECORD_BYTES, now_ns=0)
        ),
        memory=None,
        frame_bytes=RECORD_BYTES,
        record_bytes=RECORD_BYTES,
        counters=Counters(),
        clock=lambda: 0,
    )
    for _ in range(2):
        archive.note_access(keys(1), 0)
    archive.poll()
    assert written == [keys(1)] and not held
    archive.note_access(keys(1), 0)
    assert written == [keys(1)] * (1 + is_written_again)
