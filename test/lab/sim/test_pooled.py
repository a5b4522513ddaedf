# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from banyan_lab.sim import pooled
from banyan_lab.sim.offline import run_offline
from banyan_lab.sim.systems import SYSTEMS, deployment
from banyan_lab.sim.workload import agent_set

SITE = deployment("deepseek-27b", prefill_nodes=1, decode_nodes=1)


def fake_outcome(job_s, share):
    real = run_offline(SYSTEMS["dualpath"], SITE, agent_set("agents-32k"), num_agents=1)
    return replace(real, job_s=job_s, pooled_share=share)


def test_pooled_when_listed_then_ratios_of_job_times():
    times = {"Basic": 200.0, "+ scheduling (DualPath)": 100.0, "SGL(MC)": 150.0}
    rows = list(pooled.figures(lambda system: fake_outcome(times.get(system.title, 90.0), 0.5)))
    assert [row.simulated for row in rows] == pytest.approx([0.75, 1.5, 0.45, 0.9, 0.9])
    assert rows[-1].lands and all("50.0 %" in row.note for row in rows)


def test_pooled_when_played_then_a_pool_is_worth_something_to_basic_and_little_to_dualpath():
    def offline(system):
        return run_offline(system, SITE, agent_set("agents-32k"), num_agents=120)

    rows = list(pooled.figures(offline))
    assert rows[0].simulated < 0.95 and rows[-1].simulated <= 1.001
