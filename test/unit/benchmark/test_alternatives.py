# SPDX-License-Identifier: Apache-2.0
"""Banyan beside its alternatives: what is started, what is played, and what the figures say."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmark.alternatives import comparison, documented, figures, traces
from benchmark.alternatives.__main__ import build_parser
from benchmark.alternatives.comparison import Comparison, last_error_line
from benchmark.alternatives.figures import Run
from benchmark.alternatives.kept import wait_until_still
from benchmark.alternatives.page import render_html
from benchmark.alternatives.start import hicache_path
from benchmark.alternatives.systems import (
    DEFAULT_SYSTEMS,
    GIB,
    NUM_RANKS,
    Budget,
    systems_of,
    token_bytes_of,
)

BUDGET = Budget(pool_tokens=28_000, dram_tokens=40_000, disk_bytes=2 * GIB, token_bytes=23_040, dtype="bfloat16")


def flag(spec, name):
    """The value that stands behind a flag."""
    return spec.args[spec.args.index(name) + 1]


def run(system="stock", *, trace="t", phase="cold", repetition=1, ttft=2.0, cached=0.5, tokens=None, kept=None):
    """A run whose figures are made up."""
    times = {"mean": ttft, "p50": ttft, "p90": 2 * ttft, "p99": 3 * ttft, "min": ttft, "max": 4 * ttft}
    made = {
        "num_requests": 2,
        "num_errors": 0,
        "errors": [],
        "total_time_s": 10.0,
        "completed_per_s": 0.2,
        "served_tokens": 500,
        "prompt_tokens": 400,
        "cached_share": cached,
        "cached_by_source": {"device": 400 * cached, "peer": 0, "host": 0, "storage": 0, "untold": 0},
        "ttft_s": times,
        "time_per_output_token_ms": times,
        "inter_token_latency_ms": times,
        "ideal_cached_share": 0.9,
    }
    made |= {"kept": kept} if kept else {}
    return Run(system, trace, phase, 28_000, repetition, made, tokens or {})


def report_of(runs, not_run=()):
    systems = systems_of(BUDGET, Path("disk"), "")
    return {
        "rows": figures.rows_of(runs),
        "against": figures.against(runs),
        "alone": {"banyan": {"num_compared": 8, "num_identical": 7}},
        "not_run": list(not_run),
        "titles": {name: system.title for name, system in systems.items()},
        "method": "in turns",
        "budgets": [dict(BUDGET.__dict__)],
        "config": {"repetitions": 1},
        "duration_s": 9.0,
        "provenance": {
            "hardware": {"cpu_model": "a processor", "num_cores": 2, "memory_bytes": GIB},
            "versions": {"sglang": "1"},
            "commit": "abc",
            "date": "today",
        },
    }


class TestSystems:
    def test_systems_when_listed_then_all_have_the_same_pools_in_total(self):
        for system in systems_of(BUDGET, Path("disk"), "p").values():
            total = sum(spec.dp * int(flag(spec, "--max-total-tokens")) for spec in system.specs)
            assert (system.name, total) == (system.name, BUDGET.pool_tokens)

    def test_systems_when_listed_then_each_rank_has_a_core_of_its_own(self):
        for system in systems_of(BUDGET, Path("disk"), "p").values():
            cores = "|".join(dict(spec.env)["SGLANG_CPU_OMP_THREADS_BIND"] for spec in system.specs)
            assert (system.name, cores) == (system.name, "0|1")

    def test_systems_with_dram_when_listed_then_all_have_the_same_in_total(self):
        made = systems_of(BUDGET, Path("disk"), "p")
        for name in ("banyan", "banyan_even", "banyan_store", "banyan_route"):
            total = sum(float(flag(spec, "--banyan-host-gb")) for spec in made[name].specs)
            assert total == pytest.approx(BUDGET.dram_gib, rel=1e-4)
        for name in ("hicache", "hicache_dram", "router_hicache", "router_hicache_back"):
            tokens = sum(
                spec.dp * int(flag(spec, "--max-total-tokens")) * float(flag(spec, "--hicache-ratio"))
                for spec in made[name].specs
            )
            assert tokens == pytest.approx(BUDGET.dram_tokens, rel=1e-3)
        for name in ("lmcache", "router_lmcache"):
            assert made[name].lmcache.dram_gib == BUDGET.dram_gib
            assert {flag(spec, "--lmcache-config-file") for spec in made[name].specs} == {f"disk/{name}.yaml"}

    def test_systems_with_a_disk_when_listed_then_all_have_the_same(self):
        made = systems_of(BUDGET, Path("disk"), "p")
        extra = json.loads(flag(made["hicache"].specs[0], "--hicache-storage-backend-extra-config"))
        assert NUM_RANKS * extra["max_size"] == BUDGET.disk_bytes
        assert float(flag(made["banyan_store"].specs[0], "--banyan-store-gb")) * GIB == BUDGET.disk_bytes
        assert {name for name, system in made.items() if system.disk} == {"hicache", "banyan_store"}

    def test_routed_servers_when_made_then_they_share(self):
        specs = systems_of(BUDGET, Path("disk"), "p")["banyan_route"].specs
        assert {spec.share for spec in specs} == {"on"}

    def test_default_systems_when_compared_with_the_known_then_all_exist(self):
        assert set(DEFAULT_SYSTEMS) <= set(systems_of(BUDGET, Path("disk"), "p"))

    def test_budget_when_a_rank_could_not_hold_a_request_then_refused(self):
        with pytest.raises(ValueError, match="--pool-tokens 4000"):
            replace(BUDGET, pool_tokens=4_000)

    def test_token_bytes_when_heads_are_grouped_then_only_those_of_keys_count(self):
        config = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
        assert token_bytes_of(config, "bfloat16") == 23_040
        assert token_bytes_of(config, "float32") == 46_080

    def test_plugin_when_written_then_it_names_the_stand_in(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", "inherited")
        path = hicache_path(tmp_path / "plugin")
        assert path == f"{tmp_path / 'plugin'}:inherited"
        (entry,) = (tmp_path / "plugin").rglob("entry_points.txt")
        assert "sgl_kernel.hicache:offer" in entry.read_text()


class TestTraces:
    def test_workloads_when_generated_then_no_two_share_a_page(self):
        made = traces.workloads_of(traces.NAMES, None, stretch=1.0, num_requests=6)
        seen = {}
        for name, workload in made.items():
            for prompt in workload.prompts:
                seen.setdefault(tuple(prompt[:16]), set()).add(name)
        assert all(len(names) == 1 for names in seen.values())

    def test_talk_when_made_then_each_turn_begins_with_the_one_before(self):
        made = traces.workloads_of(["tool_agents"], None, stretch=1.0, num_requests=None)["tool_agents"]
        first = {}
        for request, prompt in zip(made.trace.requests, made.prompts, strict=True):
            before = first.get(request.session, [])
            assert prompt[: len(before)] == before
            assert len(prompt) > len(before)
            first[request.session] = prompt

    def test_library_when_made_then_every_document_is_asked_as_often(self):
        library = traces.Library(num_documents=3, num_questions=12)
        asked = [request.blocks[0][0] for request in traces.library_requests(library, seed=0)]
        assert sorted(asked.count(document) for document in set(asked)) == [4, 4, 4]

    def test_stretch_when_given_then_arrivals_take_longer(self):
        slow = traces.workloads_of(["documents"], None, stretch=3.0, num_requests=4)["documents"]
        assert slow.pace.time_scale == 3.0

    def test_recorded_when_the_file_is_missing_then_refused(self, tmp_path):
        with pytest.raises(ValueError, match="without --data"):
            traces.workloads_of(["conversations"], tmp_path, stretch=1.0, num_requests=None)

    def test_distinct_pages_when_beginnings_are_equal_then_counted_once(self):
        prompts = [[1, 2, 3, 4], [1, 2, 5, 6], [3, 4, 1]]
        # A page is its tokens and all before it: 3, 4 behind 1, 2 is not 3, 4 at the front; a part of one is none.
        assert traces.distinct_pages(prompts, 2) == 4


class TestFigures:
    def test_same_tokens_when_some_differ_then_counted_among_those_that_both_answered(self):
        found = figures.same_tokens({"a": [1], "b": [2], "c": [3]}, {"a": [1], "b": [9], "d": [3]})
        assert found == {"num_compared": 2, "num_identical": 1}

    def test_rows_when_repeated_then_medians_and_spread(self):
        (row,) = figures.rows_of([run(ttft=value, repetition=number) for number, value in enumerate((1.0, 3.0, 2.0))])
        assert row["ttft_s_mean"] == {"median": 2.0, "min": 1.0, "max": 3.0, "values": [1.0, 3.0, 2.0]}
        assert row["tokens_per_s"]["median"] == 50.0
        assert row["num_repetitions"] == 3

    def test_rows_when_tokens_differ_from_stock_then_counted_within_the_repetition(self):
        runs = [
            run("stock", tokens={"a": [1], "b": [1]}),
            run("stock", repetition=2, tokens={"a": [2], "b": [2]}),
            run("banyan", tokens={"a": [1], "b": [2]}),
            run("banyan", repetition=2, tokens={"a": [2], "b": [2]}),
        ]
        (row,) = [row for row in figures.rows_of(runs) if row["system"] == "banyan"]
        assert (row["num_compared"], row["num_identical"]) == (4, 3)

    def test_rows_after_a_restart_when_compared_then_with_what_stock_said_cold(self):
        runs = [run("stock", tokens={"a": [1]}), run("hicache", phase="restart", tokens={"a": [1]})]
        (row,) = [row for row in figures.rows_of(runs) if row["phase"] == "restart"]
        assert (row["num_compared"], row["num_identical"]) == (1, 1)

    def test_against_when_faster_with_more_hits_then_both_are_told(self):
        runs = [run("stock", ttft=2.0, cached=0.5), run("banyan", ttft=1.0, cached=0.7)]
        (pair,) = figures.against(runs)
        assert (pair["ours"], pair["other"]) == ("banyan", "stock")
        assert pair["ttft_ratio"]["median"] == 0.5
        assert pair["hits"]["median"] == pytest.approx(0.2)

    @pytest.mark.parametrize("ratio", [0.5, 1.1])
    @pytest.mark.parametrize("hits, told", [(0.1, "more"), (0.0001, "as many"), (-0.1, "fewer")])
    def test_standing_when_told_in_words_then_of_hits_alone_whoever_is_quicker(self, ratio, hits, told):
        assert figures.standing({"ttft_ratio": {"median": ratio}, "hits": {"median": hits}}) == told

    def test_attention_when_a_system_is_listed_then_it_is_what_its_servers_take(self):
        for name, system in systems_of(BUDGET, Path("disk"), "p").items():
            flags = [set(spec.flags(Path("model"), 1)) for spec in system.specs]
            has_engine = {bool(given & {"--enable-banyan", "--enable-banyan-cpu-engine"}) for given in flags}
            assert has_engine == {figures.ATTENTION[name] == "banyan_cpu"}, name
            assert not any("--attention-backend" in spec.args for spec in system.specs), name

    def test_times_when_the_attention_differs_then_no_ratio_is_told(self):
        ratio = {"median": 0.5, "min": 0.4, "max": 0.75}
        assert figures.ttft_beside({"ours": "banyan", "other": "router", "ttft_ratio": ratio}) == "0.50 (0.40-0.75)"
        assert figures.ttft_beside({"ours": "banyan", "other": "as_shipped", "ttft_ratio": ratio}) == "-"

    def test_systems_when_they_are_compared_then_all_but_stock_as_shipped_run_on_the_same_engine(self):
        for name, system in systems_of(BUDGET, Path("disk"), "").items():
            engines = {spec.share for spec in system.specs}
            assert engines == {"stock"} if figures.ATTENTION[name] != "banyan_cpu" else engines <= {"engine", "on"}

    def test_against_when_a_repetition_lacks_one_then_only_pairs_count(self):
        runs = [run("stock", ttft=2.0), run("stock", ttft=9.0, repetition=2), run("banyan", ttft=1.0)]
        (pair,) = figures.against(runs)
        assert pair["ttft_ratio"]["values"] == [0.5]

    def test_against_when_restarted_then_left_out(self):
        runs = [run("stock"), run("banyan_store", phase="restart")]
        assert figures.against(runs) == []

    def test_table_when_a_system_did_not_run_then_it_says_why(self):
        text = figures.table(report_of([run()], [{"system": "hicache", "reason": "no transfers"}]))
        assert "did not run: no transfers" in text
        assert "| 28,000 | t | stock SGLang, dp 2 | banyan_cpu | 50.0 % | 2.00 | 2.00 / 4.00 / 8.00 |" in text
        assert "| p50 / p90 / max s |" in text

    def test_table_when_a_report_has_no_slowest_request_then_none_is_shown(self):
        report = report_of([run()])
        for row in report["rows"]:
            row["ttft_s_p99"] = row.pop("ttft_s_max")
        text = figures.table(report)
        assert "| p50 / p90 s |" in text and "| 2.00 / 4.00 |" in text and "p99" not in text

    def test_table_when_pages_are_kept_then_bytes_of_each(self):
        kept = {"dram_bytes_per_page": 2048, "disk_bytes_per_page": 4096}
        assert "| 2 KiB, 4 KiB |" in figures.table(report_of([run("hicache", kept=kept)]))


class TestPage:
    def test_page_when_rendered_then_it_has_every_system_and_what_did_not_run(self):
        runs = [run("stock"), run("banyan", ttft=1.0, cached=0.7), run("hicache", phase="restart")]
        page = render_html(report_of(runs, [{"system": "router", "reason": "<refused>"}]))
        assert "&lt;refused&gt;" in page
        assert "after a restart" in page
        assert "<td>+20.0 points</td><td>more</td>" in page
        assert "<td>Banyan, dp 2</td><td>banyan_cpu</td>" in page
        assert "asked alone" in page and "7/8" in page


def test_error_line_when_a_log_follows_then_the_last_error_of_it():
    text = "server hicache ended with 1\n--- last lines of x.log:\nNameError: transfer_kv\n[2026] Killed"
    assert last_error_line(text) == "NameError: transfer_kv"


def test_error_line_when_nothing_names_an_error_then_the_first_line():
    assert last_error_line("server x does not answer\nfoo") == "server x does not answer"


def test_options_when_pools_are_repeated_then_all_are_measured():
    args = build_parser().parse_args(["--pool-tokens", "28000", "--pool-tokens", "9000"])
    assert args.pool_tokens == [28_000, 9_000]


class TestDocumented:
    def test_page_when_a_report_is_kept_then_conditions_and_rows(self):
        report = report_of([run("stock"), run("banyan", ttft=1.0, cached=0.7)]) | {"config": {"repetitions": 2}}
        text = documented.page([report])
        assert text.startswith("### Pools of 28,000 tokens: one repetition, at most 2 requests of a workload\n")
        assert "`python -m benchmark.alternatives --repetitions 2`, commit abc" in text
        assert "| 28,000 | t | Banyan, dp 2 | banyan_cpu | 70.0 % |" in text and "points" not in text

    def test_page_when_pages_are_kept_then_it_says_how_much_the_work_is_and_what_was_not_yet_written(self):
        kept = {"dram_bytes_per_page": 1, "disk_bytes_per_page": 1, "distinct_pages": 528, "all_written": True}
        runs = [run(kept=kept), run("hicache", kept=kept), run("banyan_store", kept=kept | {"all_written": False})]
        text = " ".join(documented.page([report_of(runs) | {"config": {}}]).split())
        assert "Distinct tokens of the prompts: t 8,448. Of Banyan with a store, dp 2 pages were still being" in text
        assert "when the wait for them was over: t (last repetition)." in text and text.count("still being") == 1

    def test_options_when_left_at_their_defaults_then_not_shown(self):
        args = build_parser().parse_args(["--data", "somewhere", "--trace", "documents", "--quick"])
        config = {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()}
        assert documented.options(config) == ["--quick", "--data somewhere", "--trace documents"]


class TestKept:
    def test_wait_when_writing_ends_then_returns_after_the_last_change(self):
        figures_seen = iter((1, 2, 3, 3, 3, 3, 3, 3, 3, 3))
        assert wait_until_still(lambda: next(figures_seen), timeout_s=5.0, still_s=0.02, poll_s=0.01)
        assert next(figures_seen) == 3

    def test_wait_when_a_look_was_held_up_then_it_looks_again(self):
        seen = []

        def figure():
            if len(seen) == 1:
                time.sleep(0.05)
            seen.append(1 if len(seen) < 2 else 2)
            return seen[-1]

        assert wait_until_still(figure, timeout_s=5.0, still_s=0.04, poll_s=0.01)
        assert seen[-1] == 2

    def test_wait_when_writing_never_ends_then_says_so(self):
        counter = iter(range(1_000_000))
        assert not wait_until_still(lambda: next(counter), timeout_s=0.05, still_s=0.5, poll_s=0.01)


def test_measure_when_the_time_is_over_then_no_system_is_started_and_each_row_says_so(tmp_path):
    compared = Comparison({}, [BUDGET], ["stock", "banyan"], tmp_path / "no model", tmp_path)
    compared.measure(1, max_s=-1.0)
    assert [one["system"] for one in compared.not_run] == ["stock", "banyan"]
    assert all("--max-minutes" in one["reason"] for one in compared.not_run)
    assert compared.runs == []


@pytest.mark.parametrize(("system", "filled"), [("banyan_store", ["a"]), ("hicache", [])])
def test_measure_when_a_flush_has_emptied_the_disk_then_it_is_filled_again_before_the_restart(
    system, filled, tmp_path, monkeypatch
):
    done = []

    def played(phase):
        def play(up, workload, *budget):
            done.append((phase, workload))
            return run(system).figures, {}

        return play

    up = SimpleNamespace(start_up_s=1.0)
    monkeypatch.setattr(comparison, "running", lambda *args: contextlib.nullcontext(up))
    monkeypatch.setattr(comparison, "warm_up", lambda up: None)
    monkeypatch.setattr(comparison, "ask_alone", lambda *args, **kwargs: {})
    monkeypatch.setattr(comparison, "play_cold", played("cold"))
    monkeypatch.setattr(comparison, "play_again", played("restart"))
    monkeypatch.setattr(comparison, "fill", lambda up, some: done.extend(("fill", one) for one in some))
    Comparison({"A": "a", "B": "b"}, [BUDGET], [system], tmp_path / "no model", tmp_path).measure(1, max_s=60.0)
    cold, again = [("cold", "a"), ("cold", "b")], [("restart", "a"), ("restart", "b")]
    assert done == [*cold, *(("fill", one) for one in filled), *again]
