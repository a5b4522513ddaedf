# SPDX-License-Identifier: Apache-2.0
import random
import time

import pytest

from benchmark import remote_page, remote_source


def test_step_when_it_fails_on_its_thread_then_the_measurement_does():
    def step():
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"), remote_source.again_and_again(step):
        pass


def test_step_when_the_measurement_ends_then_it_is_not_called_again():
    calls = []
    with remote_source.again_and_again(lambda: calls.append(1)):
        while not calls:
            time.sleep(0.001)
    num_calls = len(calls)
    time.sleep(0.05)
    assert len(calls) == num_calls


class Nodes:
    """Writes down what the second server is asked."""

    def __init__(self):
        self.asked = []
        self.borrower = self

    def generate(self, ids, **more):
        self.asked.append((ids[0], more.get("cache_salt")))

    def forget_at_borrower(self):
        self.asked.append("flush")


def test_pulls_when_all_prompts_were_taken_then_they_are_forgotten_before_the_next():
    nodes = Nodes()
    pull = remote_source.steps(nodes, [[1], [2]], random.Random(0))["pulls"]
    for _ in range(4):
        pull()
    assert nodes.asked == ["flush", (1, None), (2, None), "flush", (1, None), (2, None)]


def test_computing_when_prompts_are_asked_then_each_under_a_salt_of_its_own():
    nodes = Nodes()
    compute = remote_source.steps(nodes, [[1], [2]], random.Random(0))["computing"]
    for _ in range(3):
        compute()
    assert len({salt for _, salt in nodes.asked}) == 3 and None not in {salt for _, salt in nodes.asked}


def test_figures_when_rounds_differ_then_the_median_of_their_ratios_to_idle():
    rows = [
        {
            "way": remote_source.BOTH,
            "round": number,
            "kind": kind,
            "tpot_s": tpot_s,
            "pulled_mb_per_s": 300.0 if kind == "pulls" else 0.0,
        }
        for number, times in enumerate([(0.010, 0.011, 0.012), (0.020, 0.026, 0.020), (0.010, 0.012, 0.010)])
        for kind, tpot_s in zip(remote_source.KINDS, times, strict=True)
    ]
    slower = [
        {**row, "way": remote_source.ONE_CORE, "tpot_s": row["tpot_s"] * (2 if row["kind"] == "pulls" else 1)}
        for row in rows
    ]
    ways = dict.fromkeys((remote_source.BOTH, remote_source.ONE_CORE), ("0", "1"))
    found = remote_source.figures({"rows": rows + slower, "sizes": {}, "cores": ways})
    assert found["source_tpot_ratio"]["median"] == pytest.approx(1.2)
    assert found["source_tpot_ratio_computing"]["median"] == pytest.approx(1.0)
    assert found["pulled_mb_per_s"]["median"] == 300.0
    assert found["source_tpot_ratio_one_core"]["median"] == pytest.approx(2.4)
    assert found["source_tpot_ratio_computing_one_core"]["median"] == pytest.approx(1.0)


def test_source_page_when_a_run_is_kept_then_its_figures_stand_with_their_conditions():
    spread = {"median": 1.08, "min": 1.05, "max": 1.12}
    run = {
        "source_tpot_ratio": spread,
        "source_tpot_ratio_computing": spread,
        "pulled_mb_per_s": {"median": 300.0, "min": 290.0, "max": 310.0},
        "rows": [{"kind": "idle", "tpot_s": 0.0125}],
        "sizes": {"num_answers": 4, "answer_tokens": 150, "lent_tokens": 2000, "num_rounds": 6},
        "provenance": {
            "commit": "0123456789abcdef",
            "date": "2026-11-24T01:02:03",
            "hardware": {"cpu_model": "A processor", "num_cores": 2},
        },
    }
    page = " ".join(remote_page.source_page(run).split())
    assert "| `source_tpot_ratio` | 1.08 (1.05-1.12) | <= 1.10 |" in page
    assert "4 answers of 150 tokens at once, 12.5 ms a token" in page
    assert "over a loopback that nothing bounds" in page
    assert "one_core" not in page
    names = [name for name in remote_page.SOURCE_MARKS if name.endswith("_one_core")]
    with_both = {name: {**spread, "median": 1.2} for name in names}
    both = " ".join(remote_page.source_page({**run, **with_both}).split())
    assert "| `source_tpot_ratio_one_core` | 1.20 (1.05-1.12) | |" in both
    assert "over a path of 1000 Mbit/s" in " ".join(remote_page.source_page({**run, "link_mbit": 1000}).split())


def test_measure_when_no_network_can_be_made_then_it_says_so_and_the_path_is_unbounded(monkeypatch, tmp_path, capsys):
    row = {"way": "", "round": 0, "tpot_s": 0.01, "pulled_mb_per_s": 200.0}
    measured = {"rows": [{**row, "kind": kind} for kind in remote_source.KINDS], "sizes": {}, "cores": {"": ("0", "1")}}
    monkeypatch.setattr(remote_source, "ensure_model", lambda target: tmp_path)
    monkeypatch.setattr(remote_source.own_network, "is_possible", lambda: False)
    monkeypatch.setattr(remote_source, "_measure", lambda *args: measured)
    found = remote_source.measure(tmp_path, 0)
    assert "link_mbit" not in found and found["source_tpot_ratio"]["median"] == 1.0
    assert "not bounded" in capsys.readouterr().err


def test_measure_when_the_inner_program_fails_then_nothing_is_made_of_it(monkeypatch, tmp_path):
    monkeypatch.setattr(remote_source, "ensure_model", lambda target: tmp_path)
    monkeypatch.setattr(remote_source.own_network, "is_possible", lambda: True)
    monkeypatch.setattr(remote_source.own_network, "run_inside", lambda module, args: 1)
    with pytest.raises(RuntimeError, match="nothing was measured"):
        remote_source.measure(tmp_path, 0)


def test_ways_when_there_are_two_cores_then_the_second_server_stays_on_one_and_the_first_has_both_or_the_other():
    assert remote_source.ways_of([1, 2, 3]) == {"": ("1,2", "2"), "_one_core": ("1", "2")}


def test_ways_when_there_is_one_core_then_both_servers_are_on_it():
    assert remote_source.ways_of([5]) == {"_one_core": ("5", "5")}
