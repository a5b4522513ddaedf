# SPDX-License-Identifier: Apache-2.0
"""Reads beside the writes of a prefill, on a small store."""

import pytest

from banyan import cli
from banyan_lab.bench import permits
from banyan_lab.bench.store import blocks


def test_permits_when_measured_then_a_row_for_each_way_and_none_is_written_where_nothing_may_be(monkeypatch, tmp_path):
    monkeypatch.setattr(blocks, "BYTES_IN_ALL", 4 << 20)
    monkeypatch.setattr(permits, "SHAPE", blocks.Shape("small", 4, 32 << 10))
    for name, value in {"LAYER_S": 0.001, "NUM_FORWARDS": 2, "NUM_WARM_UPS": 0, "NUM_READ_BLOCKS": 2}.items():
        monkeypatch.setattr(permits, name, value)
    told = permits.run(str(tmp_path))
    assert [row["way"] for row in told["rows"]] == list(permits.WAYS)
    assert {row["num_forwards"] for row in told["rows"]} == {2}
    assert told["rows"][0]["written_mib"] == 0 and all(row["read_ms"] > 0 for row in told["rows"])
    assert not list(tmp_path.iterdir())


def test_bench_when_the_folder_is_missing_or_not_wanted_then_said():
    for words in (["bench", "permits"], ["bench", "copy", "--path", "x"]):
        with pytest.raises(SystemExit, match="--path DIR belongs to store and permits"):
            cli.main(words)
