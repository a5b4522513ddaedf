# SPDX-License-Identifier: Apache-2.0
"""Which layers leave when, without a sender."""

import random

import pytest

from banyan.features.pairs.advance import (
    LEAST_LAYER_BATCH_BYTES,
    LEAST_LAYER_BATCH_S,
    Advance,
    Forwards,
    Pace,
    layers_of_regions,
)


def advance_of(layer_bytes, pace=None):
    return Advance(layer_bytes=layer_bytes, least_bytes=(pace or Pace()).least_bytes)


def test_layers_when_they_are_complete_then_each_is_taken_once_and_in_order():
    advance = advance_of(LEAST_LAYER_BATCH_BYTES)
    assert not advance.completed(0)
    assert advance.completed(1)
    assert not advance.completed(2), "one waits already"
    assert advance.take() == range(0, 2)
    assert advance.completed(3) and advance.take() == range(2, 3)
    assert advance.num_taken == 3


def test_layer_batch_when_a_layer_is_small_then_it_waits_for_others():
    advance = advance_of(LEAST_LAYER_BATCH_BYTES // 3)
    assert [advance.completed(layer) for layer in range(1, 5)] == [False, False, False, True]


def test_layer_batch_when_the_network_is_fast_then_several_layers_leave_together_and_on_a_slow_one_each_by_itself():
    fast, slow = Pace(), Pace()
    fast.sent(1 << 20, LEAST_LAYER_BATCH_S / 4)
    slow.sent(1 << 20, LEAST_LAYER_BATCH_S * 40)
    layer_bytes = 1 << 20
    asked = [advance_of(layer_bytes, fast).completed(layer) for layer in range(1, 5)]
    assert asked == [False, False, False, True]
    assert advance_of(layer_bytes, slow).completed(1)


def test_pace_when_a_transfer_was_held_up_then_the_best_of_late_counts_and_fades():
    pace = Pace()
    pace.sent(10 << 20, LEAST_LAYER_BATCH_S)
    assert pace.least_bytes == 10 << 20
    for _ in range(10):
        pace.sent(1 << 20, LEAST_LAYER_BATCH_S)
    assert 3 << 20 < pace.least_bytes < 4 << 20
    for _ in range(100):
        pace.sent(1 << 10, LEAST_LAYER_BATCH_S)
    assert pace.least_bytes == LEAST_LAYER_BATCH_BYTES


def test_layers_when_they_are_told_twice_then_nothing_is_asked_for_again():
    advance = advance_of(LEAST_LAYER_BATCH_BYTES)
    advance.completed(3)
    advance.take()
    assert not advance.completed(3) and not advance.completed(1)


def test_layer_batches_when_forward_and_sender_go_on_at_random_then_none_is_lost_and_none_is_empty():
    rng = random.Random(4)
    for _ in range(200):
        advance, waiting, taken = advance_of(LEAST_LAYER_BATCH_BYTES), 0, []
        for layer in range(1, 31):
            waiting += advance.completed(layer)
            assert waiting <= 1
            while waiting and rng.random() < 0.4:
                waiting -= 1
                layers = advance.take()
                assert layers
                taken += layers
        assert taken == list(range(advance.num_taken))
        assert advance.num_taken == 30 or waiting == 1


def test_forward_when_it_was_not_announced_then_it_completes_nothing():
    forwards, heard = Forwards(), []
    forwards.completed(1)
    forwards.announce([heard.append])
    forwards.completed(2)
    forwards.begin()
    forwards.completed(3)
    forwards.begin()
    forwards.completed(4)
    assert heard == [3]


@pytest.mark.parametrize(
    ("num_regions", "num_draft_regions", "parts_per_layer", "layers"),
    [
        (6, 0, 2, (0, 1, 2, 0, 1, 2)),
        (8, 2, 2, (0, 1, 2, 0, 1, 2, 3, 3)),
        (3, 0, 1, (0, 1, 2)),
        (4, 0, 2, None),
        (3, 0, 2, None),
        (6, 0, 1, None),
    ],
)
def test_regions_when_they_are_not_part_by_part_over_all_layers_then_they_are_unknown(
    num_regions, num_draft_regions, parts_per_layer, layers
):
    found = layers_of_regions(
        num_regions, num_layers=3, num_draft_regions=num_draft_regions, parts_per_layer=parts_per_layer
    )
    assert found == layers
