# SPDX-License-Identifier: Apache-2.0
"""Who hears of the layers of a forward."""

from types import SimpleNamespace

import pytest

from banyan.sglang_plugin.rank.layer_wait import LayerWait

LAYERS = 5
ALL = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
"""Keys and values are read one after the other."""


class Forwards:
    """A rank's, and what its clock was told."""

    def __init__(self):
        self.moving, self.traced, self.ticks = None, None, []
        cache = SimpleNamespace(moving=lambda index: self.moving, lose=lambda index: None)
        clock = SimpleNamespace(begin=lambda: None, tick=lambda layer, waited_s: self.ticks.append(layer))
        planner = SimpleNamespace(
            forward_begins=lambda: None,
            spans=SimpleNamespace(forward_begins=lambda copy, num_layers: self.traced),
            pieces_running=(),
        )
        self.wait = LayerWait(cache, clock, planner, LAYERS, LAYERS, None)

    def run(self):
        self.wait.set_consumer(1)
        for layer in ALL:
            self.wait.wait_until(layer)


@pytest.fixture
def forwards():
    return Forwards()


def test_forward_when_nobody_hears_of_its_layers_then_its_clock_looks_at_the_first_and_the_last(forwards):
    forwards.run()
    assert forwards.ticks == [0, 0, 4, 4]


def test_forward_when_pages_are_under_way_then_every_layer_waits_and_the_next_forward_does_not(forwards):
    waited = []
    forwards.moving = SimpleNamespace(wait_layer=lambda layer: waited.append(layer) or 0.0)
    forwards.run()
    assert waited == ALL
    forwards.moving = None
    forwards.run()
    assert waited == ALL and forwards.ticks == [*ALL, 0, 0, 4, 4]


def test_forward_when_it_is_traced_or_watched_then_every_layer_is_told(forwards):
    traced, watched = [], []
    forwards.traced = SimpleNamespace(reads=lambda layer, waited_s: traced.append(layer))
    forwards.run()
    forwards.traced = None
    forwards.wait.tell(SimpleNamespace(begin=lambda: None, completed=watched.append))
    forwards.run()
    assert traced == watched == ALL


def test_layer_when_its_copy_cannot_be_waited_for_then_its_batch_is_lost(forwards):
    lost = []
    forwards.wait._cache.lose = lost.append

    def fails(layer):
        raise ValueError("ours")

    forwards.moving = SimpleNamespace(wait_layer=fails)
    forwards.run()
    assert lost == [1]
