# SPDX-License-Identifier: Apache-2.0
"""Real servers under pressure: prompts that share what the recorded ones share, systems of one budget, rows."""

import argparse
import json

import pytest

from benchmark.compare import TIMES, TOTALS
from benchmark.measure import RunResult
from benchmark.pressure import engine
from benchmark.pressure.workloads import documents, scan
from benchmark.workload.conversation import Message

PAGES = [[1, 2, 3], [1, 2, 4]]


def result(label, draw, run, *, ttft_s, share, distinct=None):
    spread = {"mean": ttft_s, "p50": ttft_s, "p90": ttft_s, "p99": ttft_s}
    summary = {
        **dict.fromkeys(TIMES, spread),
        **{**dict.fromkeys(TOTALS, 1.0), "total_time_s": 4.0, "prompt_tokens": 600},
        **{"cached_share": share, "cached_by_source": {"peer": 0}, "num_errors": 0, "distinct_share": distinct},
    }
    return RunResult(label, run, draw, [], [], summary)


def test_prompts_when_pages_are_common_then_so_are_tokens_and_nothing_else_is():
    prompts = engine.prompts_of(PAGES, "0")
    first, second = (prompts.chat_ids([Message("user", script.id)]) for script in prompts.scripts)
    shared = 2 * engine.PAGE_TOKENS
    assert first[:shared] == second[:shared]
    assert first[shared:] != second[shared:]
    assert [script.prompt_len for script in prompts.scripts] == [3 * engine.PAGE_TOKENS] * 2


def test_workloads_when_prompts_are_asked_twice_then_one_is_played_twice():
    (workload,) = engine.workloads_of(documents(3, seed=0), 0, concurrency=4)
    assert (len(workload.scripts), workload.num_runs) == (3, 2)


def test_workloads_when_it_is_a_scan_then_what_is_measured_is_played_once_and_has_new_prompts_but_for_the_hot_set():
    drawn = scan(8, seed=0)
    before, measured = engine.workloads_of(drawn, 0, concurrency=4)
    assert (len(before.scripts), len(measured.scripts)) == (3 * 32, 32)
    assert before.num_runs == measured.num_runs == 1
    assert not {script.id for script in before.scripts} & {script.id for script in measured.scripts}
    known, asked = (
        {tuple(part.tokenizer.chat_ids([Message("user", script.id)])) for script in part.scripts}
        for part in (before, measured)
    )
    assert len(asked & known) == 2 and len(asked) == 2 + 24


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("name", engine.SYSTEMS)
def test_system_when_it_is_started_then_all_its_ranks_hold_the_same_together(name, num_ranks):
    system = engine.system_of(name, num_ranks, 40_000, num_cores=2)
    held = 0
    for spec in system.specs:
        flags = dict(zip(spec.args[:-1], spec.args[1:], strict=True))
        held += spec.dp * int(flags["--max-total-tokens"])
        assert (flags.get("--banyan-host-gb") == "0") == (name == "banyan no arena")
    assert 40_000 - num_ranks * engine.PAGE_TOKENS < held <= 40_000
    assert {spec.share for spec in system.specs} <= {"engine", "off", "index", "on"}


def test_systems_when_dram_is_given_then_all_with_a_tier_have_as_much_and_pools_of_whole_pages(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512}'
    )
    args = argparse.Namespace(model=tmp_path, out=tmp_path / "out")
    made = engine.systems_with_dram(20_001, 10_000, args)
    assert set(made) == {"banyan", *engine.WITH_DRAM}
    for name, system in made.items():
        flags = [dict(zip(spec.args[:-1], spec.args[1:], strict=True)) for spec in system.specs]
        pools = [spec.dp * int(of["--max-total-tokens"]) for spec, of in zip(system.specs, flags, strict=True)]
        assert (name, sum(pools)) == (name, 20_000)
        if "hicache" in name:
            held = sum(tokens * float(of["--hicache-ratio"]) for tokens, of in zip(pools, flags, strict=True))
            assert held == pytest.approx(10_000)
        assert "--hicache-storage-backend" not in flags[0] and "--banyan-store" not in flags[0]
    assert made["lmcache"].lmcache.dram_gib == pytest.approx(
        float(flags_of(made["banyan"])["--banyan-host-gb"]), rel=1e-4
    )


def flags_of(system):
    (spec,) = system.specs
    return dict(zip(spec.args[:-1], spec.args[1:], strict=True))


@pytest.mark.parametrize(
    ("flags", "named"), [(["--system", "lmcache"], "--dram says"), (["--dram", "1", "--ranks", "4"], "--ranks 2")]
)
def test_main_when_dram_is_asked_for_in_part_then_it_says_what_is_lacking(flags, named, capsys):
    with pytest.raises(SystemExit):
        engine.main(["--workload", "documents", *flags])
    assert named in capsys.readouterr().err


def test_row_when_draws_differ_then_ratios_are_within_a_draw():
    results = [
        result("single", 0, 1, ttft_s=1.0, share=0.0),
        result("single", 0, 2, ttft_s=1.0, share=0.5),
        result("router", 0, 1, ttft_s=2.0, share=0.0),
        result("router", 0, 2, ttft_s=2.0, share=0.25),
        result("banyan", 0, 1, ttft_s=1.0, share=0.0),
        result("banyan", 0, 2, ttft_s=0.5, share=0.5, distinct=0.9),
        result("single", 1, 2, ttft_s=1.0, share=0.8),
        result("single", 1, 1, ttft_s=1.0, share=0.1),
        result("router", 1, 1, ttft_s=8.0, share=0.1),
        result("router", 1, 2, ttft_s=4.0, share=0.25),
        result("banyan", 1, 1, ttft_s=2.0, share=0.1),
        result("banyan", 1, 2, ttft_s=4.0, share=0.6, distinct=0.8),
    ]
    row = json.loads(json.dumps(engine.row_of("banyan", results)))
    assert row["hits_to_single"]["values"] == pytest.approx([1.0, 0.75])
    assert row["hits_to_router"]["values"] == pytest.approx([2.0, 2.4])
    assert row["ttft_to_router"]["1"]["values"] == [0.5, 0.25]
    assert row["ttft_to_router"]["2"]["values"] == [0.25, 1.0]
    assert row["distinct_share"] == [0.9, 0.8]
    assert engine.row_of("router", results)["distinct_share"] == []


def test_main_when_a_recorded_workload_has_no_folder_then_it_says_which_flag(capsys):
    with pytest.raises(SystemExit):
        engine.main(["--workload", "chats"])
    assert "--data" in capsys.readouterr().err
