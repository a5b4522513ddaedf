# SPDX-License-Identifier: Apache-2.0
"""What the store's benchmark holds against what."""

from unittest.mock import Mock

import numpy as np
import pytest

from banyan_lab.bench.store import _acts, ours
from banyan_lab.bench.store.ours import Ceiling, OurStore
from banyan_lab.bench.store.ratios import ratios


def test_ratio_when_the_drive_slows_down_after_the_common_rounds_then_only_those_count():
    told = ratios({("banyan", "get"): [1.0, 1.0, 4.0, 4.0, 4.0], ("lmdb", "get"): [2.0, 2.0]})
    assert told["get_to_best_store"] == pytest.approx(2.0)


def test_ratio_when_the_drive_changes_between_rounds_then_each_round_is_compared_with_itself():
    # Nine tenths of the other's time in all rounds but one; their medians would say 1.8 times as long.
    times = {("banyan", "get"): [0.9, 0.9, 1.8, 1.8, 1.9], ("nixl posix", "get"): [1.0, 1.0, 2.0, 2.0, 1.0]}
    assert ratios(times)["read_to_nixl"] == pytest.approx(1 / 0.9)


def test_ratio_when_there_are_several_others_then_against_the_fastest_and_nixl_is_no_store():
    times = {("banyan", "get"): [1.0], ("lmdb", "get"): [3.0], ("rocksdb", "get"): [2.0], ("nixl posix", "get"): [0.5]}
    told = ratios(times)
    assert (told["get_to_best_store"], told["read_to_nixl"]) == (2.0, 0.5)


def test_ratio_when_written_then_against_each_ceiling_by_its_name():
    times = {
        ("banyan", "put"): [1.0],
        ("ceiling, depth 2", "durable_write"): [0.9],
        ("ceiling, depth 8", "durable_write"): [0.8],
        ("private ceiling, depth 8", "durable_write"): [0.5],
    }
    told = ratios(times)
    assert told["durable_write_to_ceiling"] == pytest.approx(0.8)
    assert told["durable_write_to_ceiling_at_own_depth"] == pytest.approx(0.9)
    assert told["durable_write_to_private_ceiling"] == pytest.approx(0.5)


def test_ratio_when_nobody_else_was_measured_then_none():
    assert set(ratios({("banyan", "get"): [1.0]}).values()) == {None}


def test_paced_share_when_reads_are_slower_beside_writes_then_below_one():
    told = ratios({("banyan", "read_alone"): [1.0], ("banyan", "read_while_writes_wait"): [1.25]})
    assert told["paced_read_share"] == pytest.approx(0.8)


@pytest.mark.parametrize("has_ceiling", [True, False])
def test_round_when_the_core_was_built_without_plain_io_uring_then_the_rest_is_measured(has_ceiling):
    ceiling = Mock(Ceiling, read_depths=(16, 64), write_depths=(2, 8)) if has_ceiling else None
    names = {name for name, _, _ in _acts(ceiling, Mock(), [])}
    assert "banyan" in names and ("ceiling, depth 2" in names) is has_ceiling


def test_ours_when_it_reads_then_in_the_order_of_the_others_and_each_block_to_its_own_place(monkeypatch):
    monkeypatch.setattr(ours, "Store", Mock())
    blocks = Mock(shape=Mock(layer_bytes=10, num_layers=1, num_bytes=30), num_blocks=3)
    blocks.source_offsets, blocks.target_offsets = np.array([0, 10, 20]), np.array([30, 40, 50])
    blocks.order, blocks.fresh_keys.return_value = np.array([2, 0, 1]), ["a", "b", "c"]
    store = ours.Store.open.return_value
    store.sync.return_value, store.put.return_value, store.read.return_value.finish.return_value = 0, ["queued"], []
    OurStore(blocks, "somewhere").get_s()
    (keys,), (_, _, _, targets) = store.lookup.call_args.args, store.read.call_args.args
    assert keys == ["c", "a", "b"] and list(targets) == [50, 30, 40]
