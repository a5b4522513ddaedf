# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.arena.read_steps import layers_per_read

KIB = 1024


@pytest.mark.parametrize(
    ("layer_bytes", "num_layers"),
    [
        ([12 * KIB] * 30, 11),
        ([64 * KIB] * 32, 2),
        ([256 * KIB] * 80, 1),
        ([4 * KIB] * 8, 8),
        ([160 * KIB] + [32 * KIB] * 3, 2),
    ],
    ids=["small layers", "8B", "70B", "a page below the step", "uneven layers"],
)
def test_step_when_nobody_chose_then_the_fewest_layers_that_keep_a_drive_busy(layer_bytes, num_layers):
    assert layers_per_read(None, layer_bytes) == num_layers


@pytest.mark.parametrize(("wished", "num_layers"), [(1, 1), (7, 7), (99, 30), (0, 30)])
def test_step_when_chosen_then_so_and_never_more_than_a_page(wished, num_layers):
    assert layers_per_read(wished, [12 * KIB] * 30) == num_layers
