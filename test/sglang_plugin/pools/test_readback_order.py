# SPDX-License-Identifier: Apache-2.0
"""What comes from a GPU is acted on in the order in which it was sent, whoever sent it."""

from banyan.sglang_plugin.pools.readback_order import ReadbackOrder


class Lane:
    def __init__(self, order, name, told):
        self.order, self.name, self.told = order, name, told
        self.num_come = 0

    def send(self):
        self.order.sent(self)

    def take_next(self):
        if not self.num_come:
            return False
        self.num_come -= 1
        self.told.append(self.name)
        return True


def test_lists_when_a_later_one_comes_first_then_it_waits_for_its_turn():
    order, told = ReadbackOrder(), []
    offers, frees = Lane(order, "offer", told), Lane(order, "free", told)
    for lane in (frees, offers, frees):
        lane.send()
    offers.num_come = 1
    order.take()
    assert told == []
    frees.num_come = 2
    order.take()
    assert told == ["free", "offer", "free"]


def test_lists_when_one_sender_forgets_then_the_others_go_on():
    order, told = ReadbackOrder(), []
    offers, frees = Lane(order, "offer", told), Lane(order, "free", told)
    for lane in (offers, frees, offers):
        lane.send()
    order.forget(offers)
    frees.num_come = 1
    order.take()
    assert told == ["free"]
