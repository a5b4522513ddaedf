# SPDX-License-Identifier: Apache-2.0
import random

import pytest

from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.resources import Link, Room, UnbalancedBooks


def ends_of(flows, bytes_per_s):
    """(start_s, bytes) each; when they end, by the fluid model computed in small steps of exact pieces."""
    left = {number: size for number, (_, size) in enumerate(flows)}
    ends, now = {}, 0.0
    while left:
        live = [number for number in left if flows[number][0] <= now]
        later = [flows[number][0] for number in left if flows[number][0] > now]
        steps = [left[number] * len(live) / bytes_per_s for number in live]
        step = min(steps + [start - now for start in later])
        for number in live:
            left[number] -= bytes_per_s / len(live) * step
            if left[number] < 1e-6:
                ends[number] = now + step
                del left[number]
        now += step
    return ends


@pytest.mark.parametrize("seed", range(20))
def test_link_when_flows_come_and_go_then_ends_are_those_of_the_fluid_model(seed):
    chance = random.Random(seed)
    flows = [(chance.uniform(0, 5), chance.uniform(10, 500)) for _ in range(12)]
    sim = Simulation()
    link, ends = Link(sim, "nic", 100.0), {}
    for number, (start_s, size) in enumerate(flows):
        sim.at(
            start_s,
            lambda size=size, number=number: link.start(size, lambda: ends.setdefault(number, sim.now_s)),
        )
    sim.run()
    link.audit()
    assert ends == pytest.approx(ends_of(flows, 100.0), abs=1e-6)
    assert link.bytes_done == pytest.approx(sum(size for _, size in flows))


def test_two_resources_in_tandem_when_saturated_then_closed_form():
    """n equal jobs through a slow and a fast server: all end the first together, at n*x/a, and the second at +n*x/b."""
    sim = Simulation()
    first, second, ends = Link(sim, "nic", 50.0), Link(sim, "pcie", 200.0), []
    for _ in range(8):
        first.start(100.0, lambda: second.start(100.0, lambda: ends.append(sim.now_s)))
    sim.run()
    assert ends == pytest.approx([8 * 100 / 50 + 8 * 100 / 200] * 8)


@pytest.mark.parametrize("num_jobs", [1, 4, 40])
def test_closed_loop_over_two_resources_when_long_then_throughput_is_that_of_the_queueing_network(num_jobs):
    """Exponential sizes make it a product-form network with a closed solution (Gordon and Newell, 1967).

    With demands D1 > D2 and r = D2 / D1, n jobs keep the slow server busy with probability (1 - r^n) / (1 - r^(n+1)).
    """
    sim, done, chance = Simulation(), [], random.Random(3)
    slow, fast = Link(sim, "slow", 50.0), Link(sim, "fast", 200.0)

    def again():
        slow.start(chance.expovariate(1 / 100), fast.start, chance.expovariate(1 / 100), finish)

    def finish():
        done.append(sim.now_s)
        again()

    for _ in range(num_jobs):
        again()
    sim.run(until_s=60_000.0)
    demand_s, ratio = 100 / 50, 50 / 200
    expected_per_s = (1 - ratio**num_jobs) / (1 - ratio ** (num_jobs + 1)) / demand_s
    assert len(done) / 60_000.0 == pytest.approx(expected_per_s, rel=0.03)


def test_link_when_the_rate_changes_then_the_rest_takes_the_new_rate():
    sim, ends = Simulation(), []
    link = Link(sim, "ssd", 100.0)
    link.start(1000.0, lambda: ends.append(sim.now_s))
    sim.at(5.0, link.set_rate, 50.0)
    sim.run()
    assert ends == pytest.approx([15.0])
    link.audit()


def test_audit_when_bytes_are_invented_then_found():
    sim = Simulation()
    link = Link(sim, "nic", 100.0)
    link.start(1000.0, print)
    sim.run(until_s=1.0)
    link.served_bytes += 100
    with pytest.raises(UnbalancedBooks):
        link.audit()


def test_room_when_full_then_waiters_go_in_order_and_small_ones_do_not_overtake():
    sim, seen = Simulation(), []
    room = Room(sim, "hbm", 10)
    room.take(8, seen.append, "first")
    room.take(9, seen.append, "big")
    room.take(1, seen.append, "small")
    assert seen == ["first"] and room.num_waiting == 2
    room.give(8)
    sim.run()
    assert seen == ["first", "big", "small"] and room.held == 10 == room.peak


def test_room_when_more_is_given_back_than_held_then_unbalanced():
    room = Room(Simulation(), "hbm", 10)
    room.take(3, lambda: None)
    with pytest.raises(UnbalancedBooks):
        room.give(5)


def test_room_when_asked_for_more_than_there_is_then_refused():
    with pytest.raises(ValueError, match="hbm"):
        Room(Simulation(), "hbm", 10).take(11, print)
