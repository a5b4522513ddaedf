# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from banyan_lab.sim.engine import FIRST, NORMAL, PastEvent, Simulation


def test_events_when_at_the_same_time_then_priority_and_then_order_of_scheduling_decide():
    sim, seen = Simulation(), []
    for name, priority in (("c", NORMAL), ("a", FIRST), ("d", NORMAL), ("b", FIRST)):
        sim.at(1.0, seen.append, name, priority=priority)
    sim.run()
    assert seen == ["a", "b", "c", "d"]


def test_events_when_scheduled_in_the_past_then_refused():
    sim = Simulation()
    sim.at(2.0, lambda: sim.at(1.0, print))
    with pytest.raises(PastEvent):
        sim.run()


def test_events_when_the_time_is_no_number_then_refused():
    with pytest.raises(PastEvent):
        Simulation().at(math.nan, print)


def test_run_when_bounded_then_later_events_wait():
    sim, seen = Simulation(), []
    sim.at(1.0, seen.append, 1)
    sim.at(3.0, seen.append, 3)
    sim.run(until_s=2.0)
    assert (seen, sim.now_s) == ([1], 1.0)
    sim.run()
    assert (seen, sim.now_s) == ([1, 3], 3.0)


def test_chance_when_named_then_streams_do_not_shift_each_other():
    one, other = Simulation(7), Simulation(7)
    other.chance("unrelated").random()
    assert one.chance("turns").random() == other.chance("turns").random()
    assert one.chance("turns").random() != Simulation(8).chance("turns").random()
