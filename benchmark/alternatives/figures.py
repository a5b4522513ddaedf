# SPDX-License-Identifier: Apache-2.0
"""What the runs say: a row for each system on each workload, Banyan against the others, equal tokens. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmark.metrics import paired_ratio, ranged, spread

REFERENCE = "stock"
OURS = ("banyan", "banyan_even", "banyan_store", "banyan_route")
OTHERS = (
    *("as_shipped", "stock", "stock_again", "router", "router_hicache", "router_hicache_back", "hicache_dram"),
    *("hicache", "lmcache", "router_lmcache"),
)
ATTENTION = dict.fromkeys((*OURS, *OTHERS), "banyan_cpu") | {"as_shipped": "torch_native"}
"""The attention backend that a system takes on a CPU. Times of those with the same compare."""

QUANTILES = ("mean", "p50", "p90", "max")
"""Told of each run. Workloads have some tens of requests: their 99th percentile would be next to their slowest one."""

SOURCES = ("device", "peer", "host", "storage", "untold")
EQUAL_HITS = 0.0005


Phase = Literal["cold", "restart"]


@dataclass(frozen=True)
class Run:
    """One workload on one system. `tokens`: what was answered, by request; of requests that failed nothing."""

    system: str
    trace: str
    phase: Phase
    pool_tokens: int
    repetition: int
    figures: dict[str, Any]
    tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def key(self) -> dict[str, Any]:
        """What names it in results."""
        names = ("system", "trace", "phase", "pool_tokens", "repetition")
        return {name: getattr(self, name) for name in names}


def same_tokens(ours: Mapping[str, list[int]], theirs: Mapping[str, list[int]]) -> dict[str, int]:
    """How many requests both answered, and how many of these with the same tokens."""
    both = [key for key in ours if key in theirs]
    return {"num_compared": len(both), "num_identical": sum(ours[key] == theirs[key] for key in both)}


def same_tokens_of(run: Run, runs: Sequence[Run]) -> dict[str, int] | None:
    """The run's answers beside stock's on the same workload, pools and repetition; None where stock was not played."""
    for other in runs:
        same_work = (other.trace, other.pool_tokens, other.repetition) == (run.trace, run.pool_tokens, run.repetition)
        if same_work and (other.system, other.phase) == (REFERENCE, "cold"):
            return same_tokens(run.tokens, other.tokens)
    return None


def rows_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Per pools, workload, phase and system: median, smallest and largest of the repetitions of each figure."""
    groups: dict[tuple[int, str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.pool_tokens, run.trace, run.phase, run.system), []).append(run)
    return [_row(key, some, runs) for key, some in groups.items()]


def _row(key: tuple[int, str, str, str], some: Sequence[Run], runs: Sequence[Run]) -> dict[str, Any]:
    figures = [run.figures for run in some]

    def of(pick: Callable[[Mapping[str, Any]], Any]) -> dict[str, Any] | None:
        return spread([value for one in figures if (value := pick(one)) is not None])

    same = [found for run in some if (found := same_tokens_of(run, runs)) is not None]
    pool_tokens, trace, phase, system = key
    return {
        "pool_tokens": pool_tokens,
        "trace": trace,
        "phase": phase,
        "system": system,
        "num_repetitions": len(some),
        "num_requests": figures[0]["num_requests"],
        "num_errors": sum(one["num_errors"] for one in figures),
        "errors": [error for one in figures for error in one["errors"]][:3],
        "cached_share": of(lambda one: one["cached_share"]),
        "ideal_cached_share": figures[0].get("ideal_cached_share"),
        "cached_by_source": {source: of(lambda one, source=source: _share(one, source)) for source in SOURCES},
        **{f"ttft_s_{name}": of(lambda one, name=name: one["ttft_s"] and one["ttft_s"][name]) for name in QUANTILES},
        **{
            f"tpot_ms_{name}": of(lambda one, name=name: _quantile(one, "time_per_output_token_ms", name))
            for name in QUANTILES
        },
        "longest_gap_ms": of(lambda one: _quantile(one, "inter_token_latency_ms", "max")),
        "requests_per_s": of(lambda one: one["completed_per_s"]),
        "tokens_per_s": of(lambda one: one["served_tokens"] / one["total_time_s"] if one["total_time_s"] else None),
        "num_compared": sum(found["num_compared"] for found in same),
        "num_identical": sum(found["num_identical"] for found in same),
        "kept": _last_kept(figures),
    }


def _quantile(figures: Mapping[str, Any], name: str, quantile: str) -> float | None:
    found = figures[name]
    return None if found is None else float(found[quantile])


def _share(figures: Mapping[str, Any], source: str) -> float | None:
    """Of the prompt tokens, those that came from `source`."""
    if not figures["prompt_tokens"]:
        return None
    return float(figures["cached_by_source"].get(source, 0) / figures["prompt_tokens"])


def _last_kept(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    return next((dict(one["kept"]) for one in reversed(figures) if "kept" in one), None)


def against(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Each of Banyan's systems against each of the others on the same workload, both from cold caches.

    `hits`: the difference of the cached shares, within each repetition; `ttft_ratio`: mean TTFT of ours over theirs,
    likewise.
    """
    cold = [run for run in runs if run.phase == "cold"]
    found = []
    for pool_tokens, trace in dict.fromkeys((run.pool_tokens, run.trace) for run in cold):
        here = [run for run in cold if (run.pool_tokens, run.trace) == (pool_tokens, trace)]
        systems = dict.fromkeys(run.system for run in here)
        for ours in (name for name in OURS if name in systems):
            for other in (name for name in OTHERS if name in systems):
                pair = _pair(here, ours, other)
                if pair is not None:
                    found.append({"pool_tokens": pool_tokens, "trace": trace, "ours": ours, "other": other, **pair})
    return found


def _pair(runs: Sequence[Run], ours: str, other: str) -> dict[str, Any] | None:
    by_repetition: dict[int, dict[str, Mapping[str, Any]]] = {}
    for run in runs:
        if run.figures["ttft_s"] and run.figures["cached_share"] is not None:
            by_repetition.setdefault(run.repetition, {})[run.system] = run.figures
    both = [(found[ours], found[other]) for found in by_repetition.values() if ours in found and other in found]
    if not both:
        return None
    ratio = paired_ratio([top["ttft_s"]["mean"] for top, _ in both], [bottom["ttft_s"]["mean"] for _, bottom in both])
    hits = spread([top["cached_share"] - bottom["cached_share"] for top, bottom in both])
    assert ratio is not None and hits is not None
    return {"ttft_ratio": ratio, "hits": hits}


def ttft_beside(one: Mapping[str, Any]) -> str:
    """Mean TTFT of ours over theirs; nothing where another attention would decide it."""
    if ATTENTION[one["ours"]] != ATTENTION[one["other"]]:
        return "-"
    return ranged(one["ttft_ratio"])


def standing(one: Mapping[str, Any]) -> str:
    """Our hits beside theirs, in words. Less than a twentieth of a point is no difference."""
    hits = one["hits"]["median"]
    return "as many" if abs(hits) < EQUAL_HITS else "more" if hits > 0 else "fewer"


def table(report: Mapping[str, Any]) -> str:
    """Markdown: a row for each system on each workload, medians over repetitions, of hits and mean TTFT with their
    spread; then what did not run."""
    titles, quantiles = report["titles"], _quantiles_of(report["rows"])
    head = (
        f"| pools | workload | system | attention | cached | mean TTFT s | {' / '.join(quantiles)} s | "
        "TPOT mean / p90 ms | DRAM, disk per page | same tokens | failed |"
    )
    lines = [head, "|" + "---|" * (head.count("|") - 1), *(_line(row, titles, quantiles) for row in report["rows"])]
    lines += [
        f"| | | {titles.get(one['system'], one['system'])} | did not run: {one['reason']} |"
        for one in report["not_run"]
    ]
    return "\n".join(lines)


def _quantiles_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Those of TTFT beside the mean that all rows have: reports of before 2026-11-28 have no largest."""
    return [name for name in QUANTILES[1:] if all(f"ttft_s_{name}" in row for row in rows)]


def _line(row: Mapping[str, Any], titles: Mapping[str, str], quantiles: Sequence[str]) -> str:
    kept = row["kept"] or {}
    cells = (
        f"{row['pool_tokens']:,}",
        row["trace"] + (", after a restart" if row["phase"] == "restart" else ""),
        titles[row["system"]],
        ATTENTION[row["system"]],
        f"{_spread(row['cached_share'], 100, 1)} %",
        _spread(row["ttft_s_mean"], 1, 2),
        " / ".join(_text(row[f"ttft_s_{name}"], 1, 2) for name in quantiles),
        " / ".join(_text(row[f"tpot_ms_{name}"], 1, 0) for name in ("mean", "p90")),
        f"{kib(kept.get('dram_bytes_per_page'))}, {kib(kept.get('disk_bytes_per_page'))}",
        f"{row['num_identical']}/{row['num_compared']}",
        str(row["num_errors"]),
    )
    return f"| {' | '.join(cells)} |"


def _text(figure: Mapping[str, Any] | None, scale: float, digits: int) -> str:
    return "-" if figure is None else f"{scale * figure['median']:.{digits}f}"


def _spread(figure: Mapping[str, Any] | None, scale: float, digits: int) -> str:
    """Its median, and where repetitions differ the smallest and largest."""
    if figure is None or figure["min"] == figure["max"]:
        return _text(figure, scale, digits)
    least, most = (f"{scale * figure[name]:.{digits}f}" for name in ("min", "max"))
    return f"{_text(figure, scale, digits)} ({least}-{most})"


def kib(num_bytes: float | None) -> str:
    """For a cell of a table."""
    return f"{num_bytes / 1024:.0f} KiB" if num_bytes else "-"
