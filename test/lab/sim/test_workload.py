# SPDX-License-Identifier: Apache-2.0
import random
import statistics

import pytest

from banyan_lab.sim.hardware import table
from banyan_lab.sim.workload import agent_set, poisson_arrivals


@pytest.mark.parametrize("name", sorted(table("workloads")))
def test_trajectories_when_many_then_published_means_come_back(name):
    published = agent_set(name)
    drawn = list(published.trajectories(2500, random.Random(1)))
    contexts, totals = [], []
    for trajectory in drawn:
        context, seen = 0, []
        for append, output in zip(*trajectory, strict=True):
            seen.append(context)
            context += append + output
        contexts.append(statistics.mean(seen))
        totals.append(context)
    assert max(totals) <= published.max_tokens * 1.2
    assert statistics.mean(totals) == pytest.approx(published.mean_total_tokens, rel=0.03)
    assert statistics.mean(t.num_turns for t in drawn) == pytest.approx(published.mean_turns, rel=0.05)
    assert statistics.mean(contexts) == pytest.approx(published.mean_context_tokens, rel=0.06)
    for tokens, mean in (("appends", published.mean_append_tokens), ("outputs", published.mean_output_tokens)):
        assert statistics.mean(statistics.mean(getattr(t, tokens)) for t in drawn) == pytest.approx(mean, rel=0.08)


def test_trajectories_when_seeded_alike_then_equal():
    one, other = (list(agent_set("agents-32k").trajectories(3, random.Random(5))) for _ in range(2))
    assert one == other


def test_arrivals_when_poisson_then_rate_and_order_hold():
    times = poisson_arrivals(2.0, 5_000, random.Random(0))
    assert times == sorted(times) and len(times) / 5_000 == pytest.approx(2.0, rel=0.03)
