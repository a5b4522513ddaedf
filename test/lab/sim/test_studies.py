# SPDX-License-Identifier: Apache-2.0
"""The studies whose figures are cheap. What they say is checked against the source, with the tolerance of the rows."""

import json
import subprocess
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest

from banyan import cli
from banyan.pacing.admission import Admission
from banyan_lab.sim import cache_compute, command, cost, pd_ratio, plots, sweep, tutti
from banyan_lab.sim.chrome_trace import TurnSpans
from banyan_lab.sim.cluster import Cluster
from banyan_lab.sim.dualpath import DualPathStudy
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.figures import Figure
from banyan_lab.sim.hardware import drive
from banyan_lab.sim.online import serve
from banyan_lab.sim.systems import SYSTEMS, Reads, deployment
from banyan_lab.sim.workload import agent_set


def test_figure_when_out_of_its_range_then_it_does_not_land_and_without_a_published_one_nothing_is_said():
    row = Figure(name="x", published=10.0, simulated=11.5, unit="s", source="y", within=1.0)
    assert row.lands is False and row.as_row()["lands"] is False
    assert Figure(name="x", published=None, simulated=1.0, unit="s", source="y").lands is None


def test_cache_compute_when_listed_then_every_row_lands():
    assert [row.name for row in cache_compute.figures() if not row.lands] == []


def test_pd_range_when_the_published_node_then_the_published_range():
    found = pd_ratio.bounds(num_gpus=8, storage_ratio=Fraction(1), dram_ratio=Fraction(10))
    assert (found.low, found.high) == (Fraction(1, 7), Fraction(7, 2))


def test_pd_range_when_storage_is_too_fast_for_the_prefill_side_then_refused():
    with pytest.raises(ValueError, match="at any ratio"):
        pd_ratio.bounds(num_gpus=2, storage_ratio=Fraction(2), dram_ratio=Fraction(10))


@pytest.mark.parametrize(
    ("nodes", "share"),
    [((1, 8), 8 / 9), ((7, 2), 1.0)],
)
def test_pd_ratio_when_simulated_then_the_share_that_the_inequalities_give(nodes, share):
    assert pd_ratio.storage_share(*nodes, Reads.SPLIT) == pytest.approx(share, abs=0.015)


def test_tutti_when_a_bubble_is_half_as_long_again_as_published_then_it_does_not_land():
    (row,) = (row for row in tutti.bubbles() if row.unit == "ms")
    assert row.simulated > 1.5 * row.published and row.lands is False


def test_tutti_when_listed_then_the_crossovers_land_or_say_why_not():
    rows = {row.name: row for row in tutti.crossovers()}
    missed = [row for row in rows.values() if not row.lands]
    assert len(rows) == 4 and [row.name for row in missed] == [
        "crossover hit rate: SSD, CPU time of an object from the 9.4 s total"
    ]
    assert all(row.note for row in missed)


def test_cost_when_tiers_are_ordered_then_as_published():
    prices = {name: price.per_million_tokens for name, price in cost.prices().items()}
    assert prices["paced"] < prices["gds"] < prices["ssd"] and prices["paced"] < prices["dram"]


def test_wear_when_admission_is_stricter_then_fewer_writes_and_within_the_budget():
    capacity = drive("D7-PS1010-x2").capacity_bytes

    def day(admission, budget):
        found = cost.wear(admission, budget_bytes_per_day=budget, requests_per_s=1.5, hours=1.0)
        return found.drive_writes_per_day(capacity)

    every, twice = day(Admission.FIRST_ACCESS, None), day(Admission.SECOND_ACCESS, None)
    assert twice < every
    # The bucket starts full, with a tenth of the simulated time's budget.
    assert day(Admission.FIRST_ACCESS, int(capacity / 2)) <= 0.5 * 1.11 < every


def test_online_when_load_grows_then_the_first_token_comes_later():
    site, workload = deployment("deepseek-27b", prefill_nodes=1, decode_nodes=1), agent_set("agents-32k")
    calm, full = (
        serve(SYSTEMS["dualpath"], site, workload, agents_per_s=rate, warm_s=20.0, run_s=60.0) for rate in (0.1, 12.0)
    )
    assert calm.meets_slo and not full.meets_slo and full.ttft_s > 4 * calm.ttft_s


def test_study_when_a_run_is_asked_for_twice_then_it_is_made_once():
    lines = []
    study = DualPathStudy(num_agents=4, progress=lines.append)
    one = study.run("basic", "deepseek-27b", (1, 1), "agents-32k")
    assert study.run("basic", "deepseek-27b", (1, 1), "agents-32k") is one and len(lines) == 1


def test_sweep_when_saved_then_one_row_for_each_run_and_the_same_again():
    rows = [sweep.run(num_agents=3, sizes=((1, 1),), workloads=("agents-32k",)) for _ in range(2)]
    assert [row["key"] for row in rows[0]] == list(SYSTEMS)
    assert sweep.as_csv(rows[0]) == sweep.as_csv(rows[1])
    assert sweep.as_csv(rows[0]).count("\n") == len(SYSTEMS) + 1


def test_chrome_trace_when_exported_then_phases_of_a_turn_follow_each_other():
    sim, spans = Simulation(), TurnSpans()
    site = deployment("deepseek-27b", prefill_nodes=1, decode_nodes=1)
    cluster = Cluster(sim, site, SYSTEMS["dualpath"], on_turn=spans.add)
    cluster.start(agent_set("agents-32k").draw(sim.chance("one")))
    sim.run()
    events = [e for e in json.loads(spans.as_json())["traceEvents"] if e.get("id") == 1]
    assert [(e["name"], e["ph"]) for e in events] == [
        (name, mark) for name in ("read", "prefill", "hand over", "decode") for mark in "be"
    ]
    for end, begin in pairwise(events):
        assert end["ph"] == "b" or end["ts"] == pytest.approx(begin["ts"])


def test_cli_when_json_is_asked_for_then_rows_with_their_source(capsys):
    assert cli.main(["sim", "cache-compute", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all({"name", "published", "simulated", "unit", "source"} <= row.keys() for row in rows)
    assert {row["kind"] for row in rows} == {"simulated"}


def test_cli_when_a_table_is_printed_then_it_says_simulated(capsys):
    assert cli.main(["sim", "cache-compute"]) == 0
    assert "simulated" in capsys.readouterr().out


def test_cli_when_plots_are_asked_for_then_written(tmp_path):
    pytest.importorskip("matplotlib")
    assert cli.main(["sim", "cache-compute", "--json", "--plot", str(tmp_path)]) == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".svg"]


def test_cli_when_a_study_writes_files_and_nobody_says_where_then_refused():
    with pytest.raises(SystemExit, match="--out DIR"):
        cli.main(["sim", "sweep"])


@pytest.fixture
def no_runs(monkeypatch):
    """Whoever simulates is found out."""

    def run(*args, **kwargs):
        raise AssertionError("it has been simulated")

    monkeypatch.setattr(Simulation, "run", run)


@pytest.mark.parametrize(
    ("words", "foreign"),
    [
        (["tutti", "--trace", "a"], "--trace does not belong to tutti"),
        (["cost", "--seed", "0"], "--seed does not belong to cost"),
        (["h20", "--agents", "3"], "--agents does not belong"),
        (["dualpath", "--scale-agents", "3"], "--scale-agents does not belong"),
        (["sweep", "--out", "a", "--plot", "b"], "--plot does not belong"),
        (["trace", "--out", "a", "--json"], "--json does not belong"),
        (["dp", "--out", "a"], "--out does not belong"),
    ],
)
def test_cli_when_an_option_has_no_effect_then_refused(no_runs, words, foreign):
    with pytest.raises(SystemExit, match=foreign):
        cli.main(["sim", *words])


@pytest.mark.parametrize("study", command.STUDIES.values(), ids=command.STUDIES)
def test_options_when_they_belong_to_a_study_then_the_parser_takes_them_and_the_study_reads_them(study):
    """None has an effect that is not in the table: the study does not get it. And each in the table is read."""
    code = study.run.__code__
    flags = command._parser()._option_string_actions
    assert all(f"--{option.replace('_', '-')}" in flags for option in study.options)
    assert study.options.keys() - code.co_names <= {"json", "plot"}


def test_sim_trace_when_nobody_says_where_or_the_place_is_a_file_then_before_it_is_simulated(no_runs, tmp_path, capsys):
    with pytest.raises(SystemExit, match="--out DIR"):
        cli.main(["sim", "trace"])
    (tmp_path / "file").touch()
    assert cli.main(["sim", "trace", "--out", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_sim_trace_when_agents_are_given_then_so_many_run(tmp_path):
    def turns(num_agents):
        folder = tmp_path / str(num_agents)
        assert cli.main(["sim", "trace", "--out", str(folder), "--agents", str(num_agents)]) == 0
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
        return len({event["pid"] for event in events}), len(events)

    assert turns(129)[1] > turns(128)[1]


def test_sweep_when_it_is_saved_then_with_the_commit_of_its_own_checkout_as_it_began(monkeypatch, tmp_path):
    def run(**_):
        monkeypatch.setattr(command, "commit", lambda: "another")
        return [{"key": "x"}]

    monkeypatch.setattr(sweep, "run", run)
    monkeypatch.setattr(plots, "draw_sweep", lambda rows, folder: folder)
    head = subprocess.run(
        ["git", "-C", Path(command.__file__).parent, "rev-parse", "HEAD"], capture_output=True, text=True
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sim", "sweep", "--out", "out"]) == 0
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["commit"] == head.stdout.strip()


def test_commit_when_git_is_not_there_or_the_file_is_of_no_checkout_then_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "__file__", str(tmp_path / "command.py"))
    assert command.commit() == "unknown"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.commit() == "unknown"


def test_dp_when_its_trace_is_none_then_one_line_says_so(tmp_path, capsys):
    assert cli.main(["sim", "dp", "--trace", str(tmp_path / "typo.jsonl")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("banyan sim: ") and "typo.jsonl" in said
    (tmp_path / "long.jsonl").write_text(
        '{"timestamp": 0, "input_length": 9999999, "output_length": 1, "hash_ids": []}'
    )
    assert cli.main(["sim", "dp", "--trace", str(tmp_path / "long.jsonl")]) == 2
    assert "fits into a pool" in capsys.readouterr().err
