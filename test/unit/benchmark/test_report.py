# SPDX-License-Identifier: Apache-2.0
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import record, run_result
from rich.console import Console

from benchmark import demo as demo_module
from benchmark.control import costs_in
from benchmark.demo import SHORT, Demo, build_parser, plan_of, result_table, server_specs, show, write_report
from benchmark.measure import RunResult
from benchmark.provenance import provenance
from benchmark.report import NAMES, STOCK_DIFFERS, build_report, outputs_compared, render_html
from benchmark.servers import SHARE_FLAGS
from benchmark.source_table import cells_of

KEYS = {
    "ttft_ratio_first_run",
    "ttft_ratio_second_run",
    "hit_share_of_single_rank",
    "hit_share_stock",
    "outputs_identical",
    "control_share",
    "num_requests",
}


def results() -> list[RunResult]:
    """Two repetitions of off and on, one of stock and the single rank, two requests a run."""
    played = []
    for label, repetition, second_ttft_s, cached in (
        ("single", 1, 0.1, 90),
        ("stock", 1, 0.9, 45),
        ("off", 1, 0.4, 46),
        ("on", 1, 0.2, 89),
        ("on", 2, 0.1, 89),
        ("off", 2, 0.4, 44),
    ):
        for run, ttft_s in ((1, 0.5), (2, second_ttft_s)):
            details = {"device": cached if label != "on" else 45, "peer": 44 if label == "on" else 0}
            answer: dict[str, Any] = {"ttft_s": ttft_s, "itl_s": [0.1] * 5}
            if run == 2:
                answer |= {"cached_tokens": cached, "cached_tokens_details": details}
            played.append(run_result(label, run, repetition, record("a", **answer), record("b", position=1, **answer)))
    return played


def test_report_when_all_were_measured_then_has_the_promised_figures() -> None:
    report = build_report(results(), {"provenance": provenance(), "config": {"seed": 0}, "duration_s": 1.0})
    assert set(report) >= KEYS
    assert report["ttft_ratio_first_run"] == 1.0
    assert report["ttft_ratio_second_run"] == pytest.approx(0.375)
    assert report["hit_share_of_single_rank"] == pytest.approx(89 / 90)
    assert report["hit_share_stock"] == 0.5
    assert report["outputs_identical"] is True
    assert report["outputs"]["on_against_stock"]["num_compared"] == 8
    assert report["num_requests"] == 2 and report["num_errors"] == 0
    assert report["labels"]["on"]["run_2"]["cached_by_source"]["peer"]["median"] == 88
    json.dumps(report, allow_nan=False)


def test_report_when_a_server_was_not_measured_then_its_figures_are_none() -> None:
    report = build_report([result for result in results() if result.label == "on"], {})
    assert report["ttft_ratio_second_run"] is None and report["hit_share_of_single_rank"] is None
    assert report["outputs_identical"] is False
    assert "<svg" in render_html(report)


def test_report_when_ranks_counted_their_control_time_then_names_the_worst() -> None:
    info = {
        "internal_states": [
            {"banyan": {"dp_rank": 0, "control_us": 1, "forward_us": 1000}},
            {"banyan": {"dp_rank": 1, "control_us": 5, "forward_us": 1000}},
            {"banyan": {"dp_rank": 2, "control_us": 5, "forward_us": 0}},
            {},
        ]
    }
    costs = costs_in(info)
    assert [cost["dp_rank"] for cost in costs] == [0, 1]
    report = build_report(results(), {"servers": {"on": {"control": costs}, "stock": {"control": []}}})
    assert report["control_share"] == 0.005
    assert "0.50%" in render_html(report)


def test_html_when_outputs_differ_then_lists_them_escaped() -> None:
    odd = results()
    odd[-2].records[0].answer.output_ids[:] = [7]
    odd[-3].records[0].answer.output_ids[:] = [1, 7, 3]
    odd[-3].records[0].answer.text = "<script>"
    report = build_report(odd, {})
    page = render_html(report)
    assert report["outputs_identical"] is False
    assert "differing outputs" in page and "&lt;script&gt;" in page and "<script>" not in page


def test_html_when_rendered_then_self_contained_and_well_nested() -> None:
    page = render_html(
        {**build_report(results(), {"provenance": provenance()}), "session": build_report(results(), {})}
    )
    assert "http" not in page and "src=" not in page
    assert "Session" in page
    open_tags: list[str] = []

    class Nesting(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag != "meta":
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    parser = Nesting()
    parser.feed(page)
    assert open_tags == []


def test_demo_when_results_are_written_then_json_and_html_are_there(tmp_path: Path) -> None:
    demo = Demo(SHORT, {}, tmp_path, tmp_path)
    demo.results = {"history": results(), "session": results()}
    report = write_report(demo, {"config": {}, "duration_s": 3.0}, tmp_path)
    assert set(json.loads((tmp_path / "report.json").read_text())) >= KEYS | {"session", "labels", "servers"}
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    show(report, tmp_path)


def test_waiting_when_there_is_no_terminal_then_a_line_comes_every_15_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(demo_module, "console", Console(file=io.StringIO(), force_terminal=False))
    monkeypatch.setattr(demo_module, "say", lines.append)
    waiting = demo_module.Waiting()
    for fifths in range(1, 5 * 46):
        waiting(["off", "on"], fifths / 5)
    assert lines == [f"waiting for off, on: {at} s" for at in (15, 30, 45)]


def test_report_when_sharing_off_was_not_measured_then_banyan_is_not_held_against_stock() -> None:
    """Stock has another attention backend and dispatcher: on / stock is not what sharing is worth."""
    measured = [result for result in results() if result.label in ("stock", "on")]
    page = render_html({**build_report(measured, {}), "config": {}, "duration_s": 1.0})
    assert "<b>-</b><span>mean time to first token, second run, sharing on / off" in page
    assert "on / stock" not in page


def test_html_when_stock_is_a_row_then_its_attention_stands_beside_its_times() -> None:
    page = render_html(build_report(results(), {}))
    for name, attention in (
        (NAMES["stock"], "torch_native"),
        (NAMES["off"], "banyan_cpu"),
        (NAMES["on"], "banyan_cpu"),
    ):
        assert f"<td>run 2 · {name}</td><td>{attention}</td>" in page
    assert STOCK_DIFFERS in page and "--banyan-policy sglang" in page


def test_terminal_when_it_has_80_columns_then_no_figure_and_no_attention_is_cut() -> None:
    terminal = Console(width=80, file=io.StringIO())
    terminal.print(result_table(build_report(results(), {}), "history"))
    printed = terminal.file.getvalue()
    assert "…" not in printed
    assert re.search(r"stock +torch_native +2 +0.90 s +0.90-0.90", printed)
    assert re.search(r"sharing on +banyan_cpu +2 +0.15 s +0.10-0.20", printed)


@pytest.mark.parametrize("options", [[], ["--quick"], ["--full"]])
def test_plan_when_asked_for_then_sharing_off_and_on_take_turns_and_stock_stands_beside_them(
    options: list[str],
) -> None:
    plan = plan_of(build_parser().parse_args(options))
    assert plan.groups[-1] == ("off", "on")
    assert any("stock" in group for group in plan.groups[:-1])


def test_plan_when_servers_stand_apart_then_each_of_them_is_up_alone() -> None:
    together = plan_of(build_parser().parse_args(["--full"]))
    apart = plan_of(build_parser().parse_args(["--full", "--apart"]))
    assert apart.groups == (("single",), ("stock",), ("off",), ("on",))
    assert [label for group in together.groups for label in group] == [label for (label,) in apart.groups]


def test_plan_when_servers_are_named_then_only_those_are_up() -> None:
    options = ["--full", "--apart", "--server", "on", "--server", "off"]
    assert plan_of(build_parser().parse_args(options)).groups == (("off",), ("on",))
    with pytest.raises(ValueError, match="--server single"):
        plan_of(build_parser().parse_args(["--quick", "--server", "single"]))


def test_outputs_when_stock_was_not_measured_then_sharing_on_stands_beside_sharing_off() -> None:
    report = build_report([result for result in results() if result.label != "stock"], {})
    assert outputs_compared(report)["reference"] == "off"
    assert "identical to sharing off" in render_html(report)


def test_servers_when_off_and_on_are_compared_then_they_differ_in_sharing_alone() -> None:
    """Placement stays SGLang's on both, and neither names an attention backend: both get Banyan's."""
    specs = server_specs(16_384)
    off, on = specs["off"], specs["on"]
    assert SHARE_FLAGS[on.share] == ("--enable-banyan",)
    assert SHARE_FLAGS[off.share] == ("--enable-banyan", "--banyan-share", "off")
    assert (on.dp, on.env) == (off.dp, off.env)
    assert on.args == (*off.args, "--banyan-policy", "sglang")
    assert "--attention-backend" not in off.args


def test_source_when_off_and_on_were_measured_then_the_seven_metrics_stand_beside_the_published_ones() -> None:
    report = build_report(results(), {})
    rows = report["beside_the_source"]
    assert len(rows) == 7
    first_token = next(row for row in rows if "first token" in row["metric"])
    assert first_token["here"] == [0.5, 0.5, 0.4, pytest.approx(0.15)]
    assert cells_of(first_token)[-3:] == ["0.40", "0.15", "0.38"]
    assert all(None not in row["here"] for row in rows), "a figure that the summaries do not have"
    assert build_report([result for result in results() if result.label == "on"], {})["beside_the_source"] == []


def test_html_when_many_at_a_time_then_shows_the_published_figures_and_what_differs() -> None:
    page = render_html(build_report(results(), {"config": {"concurrency": 32, "num_prompts": 150, "dataset": "chats"}}))
    assert "Beside the published figures" in page and "150 conversations of chats" in page
    assert "Beside the published figures" not in render_html(build_report(results(), {"config": {"concurrency": 1}}))
