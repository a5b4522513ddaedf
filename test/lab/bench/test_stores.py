# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from banyan_lab import bench
from banyan_lab.bench import stores
from banyan_lab.bench.store.blocks import Shape

SMALL = Shape("small", 2, 4096)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(stores, "SHAPES", (SMALL,))
    monkeypatch.setattr("banyan_lab.bench.store.blocks.BYTES_IN_ALL", 100 * SMALL.block_bytes)
    monkeypatch.setattr(stores, "NUM_ROUNDS", 2)


@pytest.mark.parametrize("scheme", ["file", "nixl+posix"])
def test_stores_when_measured_then_a_row_for_each_block(scheme, small, tmp_path, capsys):
    assert bench.main(["stores", "--store", f"{scheme}://{tmp_path}/kv", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["store"].startswith(scheme) and row["block"] == "small"
    assert min(row["put_gbps"], row["get_gbps"], row["layerwise_get_gbps"]) > 0


def test_stores_when_no_url_is_named_then_said_so():
    with pytest.raises(SystemExit, match="--store URL"):
        bench.main(["stores"])
