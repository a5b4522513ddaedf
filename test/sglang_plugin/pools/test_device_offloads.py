# SPDX-License-Identifier: Apache-2.0
"""Nodes on their way to the peers: published in order, both kinds at once, and SGLang is told of what it holds."""

import pytest
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu

from banyan.sglang_plugin.pools.device_offloads import DeviceOffloads, NodeKeys
from banyan.sglang_plugin.pools.readback_order import ReadbackOrder

STREAM = 7


class Sent:
    """Offloads of a rank with eight pages, and what has been published."""

    def __init__(self):
        self.gpu = FakeGpu()
        self.driver = FakeDriver(self.gpu)
        self.order = ReadbackOrder()
        self.offloads = DeviceOffloads(self.driver, self.order, stream=STREAM, num_pages=8)
        self.published = []
        self.offloads.attach(self.publish)

    def publish(self, frames, keys, window):
        behind = None if window is None else (list(window[0]), window[1].tolist())
        self.published.append((frames.tolist(), keys, behind))

    def arrive(self):
        self.gpu.run()
        self.order.take()


@pytest.fixture
def sent():
    return Sent()


def test_node_when_its_numbers_have_come_then_both_kinds_are_published_at_once_and_it_is_told(sent):
    sent.offloads.send(NodeKeys(["a", "b"], ["b"]), sent.gpu.buffer([3, 5, 9]), behind=())
    sent.offloads.send(NodeKeys(["c"], None), sent.gpu.buffer([4]), behind=())
    sent.order.take()
    assert not sent.published and sent.offloads.num_completed == 0
    sent.arrive()
    assert sent.published == [([3, 5], ["a", "b"], (["b"], [9])), ([4], ["c"], None)]
    assert sent.offloads.num_completed == 2 and sent.offloads.pop_completed()


def test_node_when_it_cannot_be_published_then_sglang_is_told_and_the_next_one_keeps_its_place(sent):
    def publish(frames, keys, window):
        if keys == ["a"]:
            raise ValueError("frame 3 is in quarantine")
        sent.publish(frames, keys, window)

    class Freed:
        """What was freed between the two."""

        def take_next(self):
            sent.published.append("freed")
            return True

    sent.offloads.attach(publish)
    sent.offloads.send(NodeKeys(["a"], None), sent.gpu.buffer([3]), behind=())
    sent.order.sent(Freed())
    sent.offloads.send(NodeKeys(["b"], None), sent.gpu.buffer([4]), behind=())
    sent.arrive()
    assert sent.published == ["freed", ([4], ["b"], None)]
    assert [sent.offloads.pop_completed() for _ in range(sent.offloads.num_completed)] == [False, True]


def test_node_when_nobody_holds_it_then_it_is_published_and_not_told(sent):
    sent.offloads.send_again(NodeKeys(["a"], ["a"]), sent.gpu.buffer([3, 9]), behind=())
    sent.arrive()
    assert sent.published == [([3], ["a"], (["a"], [9]))] and sent.offloads.num_completed == 0


def test_node_when_as_many_are_under_way_as_there_are_pages_then_it_is_not_offered_again(sent):
    for number in range(3):
        node = NodeKeys([f"a{number}", f"b{number}"], [f"b{number}"])
        sent.offloads.send_again(node, sent.gpu.buffer([1, 2, 3]), behind=())
    sent.offloads.send(NodeKeys([*"cdefghij"], None), sent.gpu.buffer(range(8)), behind=())
    sent.arrive()
    assert len(sent.published) == 3, "what SGLang holds has room of its own"


@pytest.mark.parametrize("told", [True, False], ids=["given up", "forgotten"])
def test_nodes_when_they_are_dropped_then_none_is_published(sent, told):
    sent.offloads.send(NodeKeys(["a"], None), sent.gpu.buffer([3]), behind=())
    sent.offloads.send_again(NodeKeys(["b"], ["b"]), sent.gpu.buffer([4, 9]), behind=())
    (sent.offloads.give_up if told else sent.offloads.forget)()
    sent.arrive()
    assert not sent.published
    assert sent.offloads.num_completed == told and not (told and sent.offloads.pop_completed())


def test_send_when_numbers_and_keys_differ_then_valueerror_and_nothing_is_under_way(sent):
    with pytest.raises(ValueError, match="2 page numbers for 3 keys"):
        sent.offloads.send(NodeKeys(["a", "b"], ["b"]), sent.gpu.buffer([3, 5]), behind=())
    sent.arrive()
    assert not sent.published
