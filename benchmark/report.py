# SPDX-License-Identifier: Apache-2.0
"""What the demo leaves behind: `report.json` for machines and `report.html` for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from benchmark.charts import Bar, Stack, bar_chart, legend, stack_chart
from benchmark.compare import across_repetitions, mean_ttft_ratio
from benchmark.measure import RunResult
from benchmark.metrics import median_of
from benchmark.outputs import compare_outputs, disagreements_between_runs
from benchmark.source_table import beside_the_source, source_section

RUNS = (1, 2)
NAMES = {
    "off": "sharing off, dp 2",
    "on": "sharing on, dp 2",
    "single": "one rank, same total pool",
    "stock": "stock, dp 2",
}
ATTENTION = {"off": "banyan_cpu", "on": "banyan_cpu", "single": "banyan_cpu", "stock": "torch_native"}
"""The attention backend that each server takes on a CPU where the flags leave it open."""

COLORS = {"stock": "#a9a49a", "off": "#c9b48a", "on": "#2f6f4f", "single": "#7d93ad"}
SOURCES = (
    ("own rank", ("device", "untold"), "#2f6f4f"),
    ("peer rank", ("peer",), "#e0912f"),
    ("host or storage", ("host", "storage"), "#5a7fb5"),
)
COMPUTED = ("computed", "#e6e1d6")
CAPTION = (
    "Chats are sent to a server with two data-parallel ranks, then once more in another order: "
    "a rank that lacks a chat's prefix computes it again, or, with sharing on, copies it from the rank that has it."
)


def build_report(results: Sequence[RunResult], about: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of one workload mode. `about` (provenance, config, ...) is put in as it is.

    A figure whose servers were not measured is None, never a guess.
    """
    labels = list(dict.fromkeys(result.label for result in results))
    ratios = {
        name: mean_ttft_ratio(results, "on", base, run)
        for name, base, run in (
            ("on_to_off_first_run", "off", 1),
            ("on_to_off_second_run", "off", 2),
            ("on_to_stock_first_run", "stock", 1),
            ("on_to_stock_second_run", "stock", 2),
        )
    }
    outputs = compare_outputs(results, "on", "stock")
    figures = {label: {f"run_{run}": across_repetitions(results, label, run) for run in RUNS} for label in labels}
    return {
        "ttft_ratio_first_run": median_of(ratios["on_to_off_first_run"]),
        "ttft_ratio_second_run": median_of(ratios["on_to_off_second_run"]),
        "hit_share_of_single_rank": _hit_share(results, "on"),
        "hit_share_off": _hit_share(results, "off"),
        "hit_share_stock": _hit_share(results, "stock"),
        "outputs_identical": outputs["identical"],
        "num_requests": max((len(result.records) for result in results), default=0),
        "num_errors": sum(result.summary["num_errors"] for result in results),
        "control_share": _control_share(about.get("servers", {}).get("on", {})),
        "outputs": {
            "on_against_stock": outputs,
            "on_against_off": compare_outputs(results, "on", "off"),
            # Rounding differs with the batch a request falls into: how often a server contradicts itself.
            "disagreements_with_itself": {label: disagreements_between_runs(results, label) for label in labels},
        },
        "ttft_ratios": ratios,
        "labels": figures,
        "beside_the_source": beside_the_source(figures),
        **about,
    }


def render_html(report: Mapping[str, Any]) -> str:
    """A self-contained page: one sentence, the verdict, two charts, one table, what it was measured on."""
    parts = [
        "<h1>One prefix cache over all ranks</h1>",
        f"<p class='lead'>{escape(CAPTION)}</p>",
        _verdict(report),
        _workload_section(report, "History: one request per chat, carrying its last messages"),
    ]
    if report.get("session"):
        parts.append(_workload_section(report["session"], "Session: every turn a request, on the model's own answers"))
    if report.get("config", {}).get("concurrency", 1) > 1:
        parts.append(source_section(report.get("beside_the_source", []), report["config"]))
    parts.append(_about(report))
    return html_page("Banyan demo", parts)


def html_page(title: str, parts: Iterable[str]) -> str:
    """A self-contained page of these parts, empty ones left out."""
    body = "\n".join(part for part in parts if part)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>
<body><main>{body}</main></body></html>
"""


def _verdict(report: Mapping[str, Any]) -> str:
    outputs = outputs_compared(report)
    reference = plain_name(outputs["reference"])
    same = outputs["num_compared"] - outputs["num_differing"]
    tiles = (
        (number(report["ttft_ratio_second_run"]), "mean time to first token, second run, sharing on / off"),
        (number(report["ttft_ratio_first_run"]), "the same, first run: what it costs"),
        (percent(cached_again(report, "on")), "of the prompt tokens cached in the second run, sharing on"),
        (percent(cached_again(report, "off")), "of them with sharing off"),
        (f"{same}/{outputs['num_compared']}", f"greedy outputs identical to {reference}, token by token"),
        (percent(report["control_share"], digits=2), "of forward time: the scheduler's work for sharing"),
    )
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(text)}</span></div>" for value, text in tiles)
    return f"<div class='tiles'>{cells}</div>{_differences(report)}"


def plain_name(label: str) -> str:
    """Without how many ranks it has."""
    return NAMES[label].partition(",")[0]


def outputs_compared(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sharing on beside stock; where stock was not measured, beside sharing off."""
    outputs = report["outputs"]
    return outputs["on_against_stock" if "stock" in report["labels"] else "on_against_off"]


def _differences(report: Mapping[str, Any]) -> str:
    outputs = outputs_compared(report)
    if not outputs["differences"]:
        return ""
    rows = "".join(
        f"<tr><td>{escape(item['request'])}</td><td>{item['run']}</td><td>{item['first_differing_token']}</td>"
        f"<td>{escape(item['ours'])}</td><td>{escape(item['theirs'])}</td></tr>"
        for item in outputs["differences"]
    )
    itself = report["outputs"]["disagreements_with_itself"]
    note = ", ".join(f"{NAMES.get(label, label)}: {count}" for label, count in itself.items())
    return (
        f"<details open><summary>First of {outputs['num_differing']} differing outputs</summary><table><tr>"
        f"<th>request</th><th>run</th><th>token</th><th>sharing on</th><th>{plain_name(outputs['reference'])}</th></tr>"
        f"{rows}</table><p>Requests that a server answered differently from its own first answer: {escape(note)}.</p>"
        "</details>"
    )


def _workload_section(report: Mapping[str, Any], title: str) -> str:
    shown = [(label, run) for run in RUNS for label in NAMES if label in report["labels"]]
    bars, stacks, rows = [], [], []
    for label, run in shown:
        figures = report["labels"][label][f"run_{run}"]
        name = f"run {run} · {NAMES[label]}"
        ttft = figures["ttft_s_mean"]
        if ttft:
            bars.append(Bar(name, ttft["median"], ttft["min"], ttft["max"], COLORS[label]))
        stacks.append(_stack(name, figures))
        rows.append(_table_row(name, ATTENTION[label], figures))
    colors = [*((name, color) for name, _, color in SOURCES), COMPUTED]
    head = "".join(f"<th>{escape(column)}</th>" for column in ("", *COLUMNS))
    return (
        f"<h2>{escape(title)}</h2>"
        "<h3>Mean time to first token (median of repetitions, whisker: lowest to highest)</h3>"
        f"{bar_chart(bars, unit='s', title='mean time to first token')}"
        f"<h3>Where the prompt's KV came from</h3>{legend(colors)}"
        f"{stack_chart(stacks, title='prompt tokens by source')}"
        f"<table><tr>{head}</tr>{''.join(rows)}</table>"
    )


def _stack(name: str, figures: Mapping[str, Any]) -> Stack:
    prompt_tokens = median_of(figures["prompt_tokens"]) or 0
    if not prompt_tokens:
        return Stack(name, ())
    by_source = figures["cached_by_source"]
    parts = [
        (title, sum(median_of(by_source.get(source)) or 0 for source in sources) / prompt_tokens, color)
        for title, sources, color in SOURCES
    ]
    cached = sum(share for _, share, _ in parts)
    return Stack(name, (*parts, (COMPUTED[0], max(0.0, 1 - cached), COMPUTED[1])), f"{cached:.1%} cached")


def _table_row(name: str, attention: str, figures: Mapping[str, Any]) -> str:
    cells = (
        attention,
        _with_unit(figures["ttft_s_mean"], "s"),
        _with_unit(figures["ttft_s_p50"], "s"),
        _with_unit(figures["ttft_s_p99"], "s"),
        _with_unit(figures["time_per_output_token_ms_mean"], "ms", digits=0),
        _with_unit(figures["latency_s_mean"], "s"),
        _with_unit(figures["total_time_s"], "s", digits=1),
        _with_unit(figures["completed_per_s"], ""),
        percent(median_of(figures["cached_share"])),
        str(figures["num_repetitions"]),
    )
    return f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _about(report: Mapping[str, Any]) -> str:
    order = APART if report.get("config", {}).get("one_server_at_a_time") else IN_TURNS
    facts = measured_on(report, {"failed requests": report.get("num_errors")})
    return f"{facts}<p>{METHOD} {order} {STOCK_DIFFERS}</p>"


def measured_on(report: Mapping[str, Any], more: Mapping[str, Any]) -> str:
    """Where and how a run took place, and `more` that is to be known of it, as a part of the page."""
    provenance = report.get("provenance", {})
    machine, versions = provenance.get("hardware", {}), provenance.get("versions", {})
    facts = {
        "machine": f"{machine.get('cpu_model')}, {machine.get('num_cores')} cores, "
        f"{machine.get('memory_bytes', 0) / 2**30:.0f} GiB; GPUs: {', '.join(machine.get('gpus', [])) or 'none'}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "commit": provenance.get("commit") or "not a checkout",
        "date": provenance.get("date"),
        "settings": ", ".join(f"{name} {value}" for name, value in report.get("config", {}).items()),
        "took": f"{report.get('duration_s', 0):.0f} s with start-ups",
        **more,
    }
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
    return f"<h2>Measured on</h2><table class='facts'>{rows}</table>"


def _hit_share(results: Sequence[RunResult], label: str) -> float | None:
    """Cached tokens of `label` in run 2 (median of repetitions) over those of the single rank."""
    ours, single = (
        [result.summary["cached_tokens"] for result in results if result.label == name and result.run == 2]
        for name in (label, "single")
    )
    if not ours or not single or not median(single):
        return None
    return float(median(ours) / median(single))


def cached_again(report: Mapping[str, Any], label: str) -> float | None:
    """Of the prompt tokens of the second run, those that `label` found cached; None where it was not measured."""
    figures = report["labels"].get(label)
    return None if figures is None else median_of(figures["run_2"]["cached_share"])


def _control_share(server: Mapping[str, Any]) -> float | None:
    """Of the busiest rank's forward time, the part that its scheduler thread spent in Banyan."""
    return max((rank["control_share"] for rank in server.get("control", ())), default=None)


def _with_unit(spread: Mapping[str, Any] | None, unit: str, *, digits: int = 2) -> str:
    value = median_of(spread)
    return "-" if value is None else f"{value:.{digits}f} {unit}".strip()


def number(value: float | None) -> str:
    """Two decimals; a dash for what was not measured."""
    return "-" if value is None else f"{value:.2f}"


def percent(value: float | None, *, digits: int = 1) -> str:
    """A dash for what was not measured."""
    return "-" if value is None else f"{value:.{digits}%}"


COLUMNS = (
    *("attention", "TTFT mean", "TTFT p50", "TTFT p99", "per output token", "latency"),
    *("total", "requests/s", "cached", "n"),
)
STOCK_DIFFERS = (
    "Stock differs in more than sharing: it runs without banyan-cpu-engine, on the stand-in for sgl_kernel. Its "
    "attention backend (torch_native) computes the queries of a cached prefix again, where banyan_cpu computes the new "
    "ones alone, and its dispatcher keeps a core busy. Its hits compare, its times do not. AMX is switched off for all."
)
METHOD = (
    "Sharing off, sharing on and the single rank are servers of the same kind, with the same attention backend and "
    "dispatcher, so on / off shows sharing alone; for that, sharing on has <code>--banyan-policy sglang</code>: "
    "requests go round robin everywhere, where Banyan's default places them by what is cached."
)
IN_TURNS = (
    "Off and on were measured alternately, the idle one asleep, caches emptied before each repetition; stock and the "
    "single rank before them, on the same requests."
)
APART = "One server was up at a time, one after the other, on the same requests."
STYLE = """
:root{--ink:#23271f;--soft:#6d7166;--line:#e3dfd4;--paper:#fbfaf6;--card:#fff}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:920px;margin:0 auto;padding:40px 24px 72px}
h1{font-size:34px;margin:0 0 8px}h2{font-size:22px;margin:44px 0 4px}
h3{font-size:15px;color:var(--soft);margin:20px 0 6px}
.lead{font-size:18px;color:var(--soft);margin:0 0 26px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:14px}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px}
.tiles b{display:block;font-size:28px}.tiles span{font-size:13px;color:var(--soft)}
svg{width:100%;height:auto}
svg text{font:13px system-ui,sans-serif;fill:var(--ink);dominant-baseline:middle}
svg .label{text-anchor:end}svg .value{fill:var(--soft)}svg .whisker{stroke:var(--ink);fill:none}
.legend span{margin-right:18px;font-size:13px}
.legend i{display:inline-block;width:12px;height:12px;margin-right:6px}
table{border-collapse:collapse;width:100%;font-size:13px;margin-top:14px}
td,th{border-bottom:1px solid var(--line);padding:6px 8px;text-align:right}
td:first-child,th:first-child,.facts td,details td{text-align:left;overflow-wrap:anywhere}
details{margin-top:16px}
@media(prefers-color-scheme:dark){:root{--ink:#ece9e0;--soft:#a6a89c;--line:#3a3d35;--paper:#1c1e19;--card:#25281f}}
""".strip()
