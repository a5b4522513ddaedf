# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/benchmarks/alternatives.md, from reports that are kept beside it. Written by ``make docs``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.alternatives import figures
from benchmark.alternatives.systems import PAGE_TOKENS, USUAL_DRAM_TOKENS
from benchmark.kept_table import wrapped
from benchmark.provenance import commit_in_words

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
PATTERN = "alternatives*.json"
"""Each a `report.json` of `make compare`."""

SHOWN = ("data", "dtype", "repetitions", "num_requests", "max_minutes", "stretch")


def tables() -> str:
    """The tables of all kept reports."""
    return page([json.loads(path.read_text()) for path in sorted(FOLDER.glob(PATTERN))])


def page(reports: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    return "\n".join(
        f"### {heading(report)}\n\n{wrapped(conditions(report))}\n\n{figures.table(report)}\n" for report in reports
    )


def heading(report: Mapping[str, Any]) -> str:
    """What tells this run from the others: its pools, and how often what was played."""
    pools = " and ".join(f"{budget['pool_tokens']:,}" for budget in report["budgets"])
    num_repetitions = max((row["num_repetitions"] for row in report["rows"]), default=0)
    most = max((row["num_requests"] for row in report["rows"]), default=0)
    times = "one repetition" if num_repetitions == 1 else f"{num_repetitions} repetitions"
    dram = {budget["dram_tokens"] for budget in report["budgets"]} - {USUAL_DRAM_TOKENS}
    beside = "".join(f", {num_tokens:,} of DRAM" for num_tokens in sorted(dram))
    return f"Pools of {pools} tokens{beside}: {times}, at most {most} requests of a workload"


def conditions(report: Mapping[str, Any]) -> str:
    """Command, commit, machine, versions, how much work it was."""
    where = report["provenance"]
    machine = where["hardware"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    alone = ", ".join(
        f"{report['titles'][name]} {found['num_identical']}/{found['num_compared']}"
        for name, found in report["alone"].items()
    )
    command = " ".join(["python -m benchmark.alternatives", *options(report["config"])])
    return (
        f"`{command}`, {commit_in_words(where['commit'])}, {where['date'][:10]}, "
        f"{report['duration_s'] / 60:.0f} minutes, {machine['cpu_model']} with {machine['num_cores']} cores, "
        f"{report['budgets'][0]['dtype']}; "
        f"{versions}. "
        f"Requests that were alone on a system, answered as stock did: {alone}.{_work(report)}"
    )


def _work(report: Mapping[str, Any]) -> str:
    """What there was to hold, for whoever compares it with the pools; and where bytes on disk are not all of them."""
    sizes: dict[str, int] = {}
    unwritten: dict[str, list[str]] = {}
    for row in report["rows"]:
        if not (kept := row["kept"]):
            continue
        sizes[row["trace"]] = kept["distinct_pages"] * PAGE_TOKENS
        if not kept["all_written"]:
            unwritten.setdefault(row["system"], []).append(row["trace"])
    told = [f" Distinct tokens of the prompts: {', '.join(f'{name} {size:,}' for name, size in sizes.items())}."]
    told += [
        f" Of {report['titles'][name]} pages were still being written when the wait for them was over: "
        f"{', '.join(workloads)} (last repetition)."
        for name, workloads in unwritten.items()
    ]
    return "".join(told) if sizes else ""


def options(config: Mapping[str, Any]) -> list[str]:
    """The command line that gives this configuration; paths are shown by their last name."""
    shown = []
    for name, value in config.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            shown.append(flag)
        elif isinstance(value, list):
            shown += [f"{flag} {one}" for one in value]
        elif name in SHOWN and value not in (None, 1, float("inf")):
            shown.append(f"{flag} {value}")
    return shown
