# SPDX-License-Identifier: Apache-2.0
"""The example that docs/tour.md walks through."""

import runpy
from pathlib import Path

import numpy as np

EXAMPLE = Path(__file__).parents[2] / "examples" / "small_linker.py"


def test_example_when_it_runs_then_one_rank_has_the_other_ones_bytes_and_nothing_is_held(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank 1 finds 6 of 8 pages")
    assert lines[1:] == ["copied 6144 bytes, all equal", "rank 0 may write 6 of its 6 pages again"]


def test_page_when_a_peer_reads_it_then_it_is_not_handed_out_until_the_copy_has_ended():
    example = runpy.run_path(str(EXAMPLE))
    rank_table = example["RankTable"].create(2)
    first, second = (example["SmallRank"](rank_table, rank) for rank in range(2))
    keys = example["page_keys"](range(32))
    first.offload(keys, [3, 4])
    second.lookup("r", keys)
    assert second.load("r", keys, [0, 1])
    assert first.free([3, 4]) == []
    assert second.finish(second.start())
    assert sorted(np.frombuffer(first.cache.drain(), dtype=np.int64)) == [3, 4]
