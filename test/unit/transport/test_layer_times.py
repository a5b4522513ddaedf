# SPDX-License-Identifier: Apache-2.0
"""Prefills timed by the device: what is told, when, and what is no lesson."""

import pytest
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu

from banyan.transport.cuda_ipc.driver import DriverError
from banyan.transport.cuda_ipc.layer_times import LayerTimer

STREAM, NUM_LAYERS, OPS_PER_LAYER = 5, 4, 3


class Rig:
    def __init__(self, num_layers=NUM_LAYERS):
        self.gpu = FakeGpu()
        self.driver = FakeDriver(self.gpu)
        self.told = []
        self.stream = STREAM
        self.num_layers = num_layers
        self.timer = LayerTimer(
            self.driver,
            num_layers=num_layers,
            current_stream=lambda: self.stream,
            took=lambda forward, layer_us: self.told.append((forward, layer_us)),
        )

    def forward(self, name, num_layers=None):
        self.timer.begin(name)
        for layer in range(num_layers or self.num_layers):
            # Attention asks for K and for V.
            self.timer.tick(layer)
            self.timer.tick(layer)
            for _ in range(OPS_PER_LAYER):
                self.gpu.enqueue(STREAM, lambda: None)


@pytest.fixture
def rig():
    return Rig()


def test_forward_when_the_device_has_passed_it_then_it_is_told_with_the_time_of_a_layer(rig):
    rig.forward("a")
    rig.timer.poll()
    assert not rig.told, "it is only enqueued"
    rig.gpu.run()
    rig.timer.poll()
    # Three layers lie between the marks, and the mark itself takes a microsecond.
    assert rig.told == [("a", pytest.approx((OPS_PER_LAYER * 3 + 1) / 3))]


def test_forwards_when_several_are_under_way_then_each_is_told_once_and_in_order(rig):
    for name in "abc":
        rig.forward(name)
    rig.gpu.run()
    rig.timer.poll()
    rig.timer.poll()
    assert [name for name, _ in rig.told] == ["a", "b", "c"]
    made = rig.driver.names().count("create_event")
    rig.forward("d")
    assert rig.driver.names().count("create_event") == made, "events are used again"


@pytest.mark.parametrize("num_layers", [1, 3])
def test_forward_when_it_does_not_come_to_its_last_layer_then_nothing_is_told_of_it(rig, num_layers):
    rig.forward("short", num_layers)
    rig.forward("whole")
    rig.gpu.run()
    rig.timer.poll()
    assert [name for name, _ in rig.told] == ["whole"]


def test_forward_when_it_is_not_announced_or_captured_then_no_event_is_recorded(rig):
    rig.forward(None)
    rig.stream = None
    rig.forward("captured")
    assert not rig.driver.calls


def test_forward_when_a_graph_shows_only_its_last_layer_then_nothing_is_told(rig):
    rig.timer.begin("graph")
    rig.timer.tick(NUM_LAYERS - 1)
    rig.gpu.run()
    rig.timer.poll()
    assert not rig.told


def test_forward_when_the_model_has_one_layer_then_nothing_is_told():
    rig = Rig(num_layers=1)
    rig.forward("a")
    rig.gpu.run()
    rig.timer.poll()
    assert not rig.told and not rig.driver.calls


def test_time_when_an_event_keeps_none_then_refused_as_cuda_does(rig):
    plain, timing = rig.driver.create_event(), rig.driver.create_timing_event()
    for event in (plain, timing):
        rig.driver.record_event(event, STREAM)
    rig.gpu.run()
    for pair in ((plain, timing), (timing, plain)):
        with pytest.raises(DriverError, match="INVALID_HANDLE"):
            rig.driver.elapsed_s(*pair)
