# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan_lab.sim.latencies import Part
from banyan_lab.sim.rates import RateSweep

SMALL = {"model": "deepseek-27b", "sizes": (1, 1), "workload": "agents-32k", "warm_s": 10.0, "run_s": 30.0}


def test_sweep_when_listed_then_each_rate_has_its_parts_and_they_add_up():
    rows = {row.name: row.simulated for row in RateSweep(rates=(0.2, 0.4), **SMALL).figures()}
    for rate in (0.2, 0.4):
        for system in ("Basic", "+ scheduling (DualPath)"):
            head = f"{rate} agents/s, {system}: mean"
            parts = [rows[f"{head} TTFT, {part.value}"] for part in Part]
            assert rows[f"{head} TTFT"] == pytest.approx(sum(parts))
            assert rows[f"{head} TTST"] == pytest.approx(rows[f"{head} hand-over"] + rows[f"{head} TPOT"])


def test_sweep_when_both_systems_keep_the_slo_then_the_claims_are_compared_there():
    found = [row for row in RateSweep(rates=(0.2, 12.0), **SMALL).figures() if row.published is not None]
    assert [row.name.split(",")[0] for row in found] == ["time to the second token", "time per output token"]
    assert all("of 1 rates" in row.name for row in found)
    assert found[1].lands


def test_sweep_when_a_rate_is_too_much_for_basic_then_what_it_adds_is_queueing():
    sweep = RateSweep(rates=(0.2, 12.0), **SMALL)
    growth = [row for row in sweep.figures() if row.name.startswith("queueing at 12.0")]
    run = sweep.served("basic", 12.0)
    assert len(growth) == 2 and growth[0].simulated > 1.0
    assert run.queued_s > 0.5 * run.ttft_s


def test_sweep_when_a_run_is_asked_for_twice_then_it_is_made_once():
    lines = []
    sweep = RateSweep(rates=(0.2,), progress=lines.append, **SMALL)
    assert sweep.served("basic", 0.2) is sweep.served("basic", 0.2) and len(lines) == 1


def test_picture_when_drawn_then_every_part_is_in_it(tmp_path):
    pytest.importorskip("matplotlib")
    from banyan_lab.sim.plots import draw_parts

    path = draw_parts(RateSweep(rates=(0.2,), **SMALL).by_system(), tmp_path)
    assert path.read_text().count("<g id=") > 2 * len(Part)
