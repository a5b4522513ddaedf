# SPDX-License-Identifier: Apache-2.0
"""The table of docs/pd.md, from a run whose figures are kept beside it. Written by ``make docs``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.figures_table import figures_table
from benchmark.kept_table import command_of, kept_page, kept_table
from benchmark.metrics import ranged
from benchmark.provenance import place_and_time

KEPT = Path(__file__).parents[1] / "docs" / "benchmarks" / "pd.json"
"""A ``figures.json`` of ``make pd``."""

DUAL_KEPT = KEPT.with_name("pd_dual.json")
"""A ``dual_figures.json`` of ``make pd ARGS=--dual``."""

MARKS = {
    "pd_outputs_identical": "true",
    "next_turn_cached_share": ">= 0.97",
    "ttft_no_hit_ratio": "<= 1.03",
    "idle_decode_locked_tokens": "0",
    "handover_bytes_ratio": "<= 0.10",
    "decode_pool_whole": "true",
    "killed_decode_right": "true",
    "locked_tokens_after_kill": "0",
}


def table() -> str:
    """The figures of the kept run, and where it ran."""
    return kept_page(KEPT, page)


def page(run: Mapping[str, Any]) -> str:
    return figures_table(run, {name: mark for name, mark in MARKS.items() if name in run}, _conditions(run))


DUAL_MARKS = {
    "dual_ttft_ratio": "<= 0.5",
    "split_ratio": "<= 0.7",
    "unlimited_ratio": "<= 1.05",
    "read_balance_max_over_mean": "<= 1.25",
    "dual_outputs_identical": "true",
    "agents_jct_ratio": "<= 0.7",
    "tpot_ratio": "<= 1.10",
    "tpot_ratio_hurried": "",
    "sim_error": "<= 0.15",
}


def dual_table() -> str:
    """What reading on both sides was worth in the kept run, and where it ran."""
    return kept_page(DUAL_KEPT, dual_page)


def dual_page(run: Mapping[str, Any]) -> str:
    return figures_table(run, {name: mark for name, mark in DUAL_MARKS.items() if name in run}, _dual_conditions(run))


SLOW_KEPT, CLASSES_KEPT = KEPT.with_name("pd_slow.json"), KEPT.with_name("pd_classes.json")
"""What ``make pd ARGS=--slow`` and ``--classes`` write as ``*_figures.json``."""

SLOW_MARKS = {
    "exposed_transfer_share": "<= 0.15",
    "exposed_transfer_share_stock": "",
    "handover_wire_ratio": "<= 0.10",
}
COMBINED_KEPT = KEPT.with_name("pd_combined.json")
"""A report of ``python -m benchmark.pd_combined``."""

COMBINED_RATIOS = ("tokens_per_s_ratio", "ttft_ratio", "itl_ratio", "itl_p99_ratio")
CLASSES_MARKS = {
    "high_class_p99_ratio": "<= 1.3",
    "high_class_p99_ratio_copying": "",
    "high_class_p99_ratio_bounded": "",
    "high_class_p99_ratio_unmarked": "",
    "pulls_path_share": ">= 0.9",
    "pulls_path_share_bounded": "",
}


def slow_table() -> str:
    """What was seen of hand-overs over a slow network, and where it ran."""
    return kept_page(SLOW_KEPT, slow_page)


def slow_page(run: Mapping[str, Any]) -> str:
    found, sizes = run["slow"], run["slow"]["sizes"]
    times = [statistics.median(found["kinds"]["on"][name]) for name in ("fast_ttft_s", "slow_ttft_s")]
    conditions = (
        f"`python -m benchmark.pd --slow`, {place_and_time(found['provenance'])}. {sizes['num_prompts']} cold prompts "
        f"of {sizes['prompt_tokens']} tokens with a fast network and with one of {sizes['link_mbit']} Mbit/s, NIXL "
        f"over TCP; one at a time. With Banyan the first token took {times[0]:.2f} s with the fast one, "
        f"{times[1]:.2f} s with the slow one, where sending took {found['kinds']['on']['transfer_s']:.2f} s."
    )
    return figures_table(run, SLOW_MARKS, conditions)


def combined_table() -> str:
    """A pair against two servers that do both, by length and load, in the kept run."""
    return kept_page(COMBINED_KEPT, combined_page)


def combined_page(run: Mapping[str, Any]) -> str:
    sizes = run["sizes"]
    rows = [
        f"| {cell['prompt_tokens']:,} | {cell['in_flight']} | "
        + " | ".join(ranged(cell[ratio]) for ratio in COMBINED_RATIOS)
        + f" | {_ttfts(cell['medians'])} |"
        for cell in run["cells"]
    ]
    conditions = (
        f"`{command_of('benchmark.pd_combined', run['config'])}`, {place_and_time(run['provenance'])}. Answers of "
        f"{sizes['answer_tokens']} tokens; medians of {sizes['num_rounds']} rounds in turns, smallest and largest."
    )
    head = "| prompt | in flight | tokens/s | TTFT | between tokens | its p99 | TTFT of each: pair, combined |"
    return kept_table(head, rows, conditions)


def _ttfts(medians: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(f"{medians[kind]['ttft_s']:.2f} s" for kind in ("pair", "combined"))


def classes_table() -> str:
    """What a traffic class was worth in the kept run, and where it ran."""
    return kept_page(CLASSES_KEPT, classes_page)


def classes_page(run: Mapping[str, Any]) -> str:
    sizes = run["classes"]["sizes"]
    conditions = (
        f"`python -m benchmark.pd --classes`, {place_and_time(run['classes']['provenance'])}. "
        f"{sizes['num_rounds']} rounds of {sizes['round_s']:g} s each with nothing, with marked, with bounded and "
        f"with unmarked pulls, on a loopback limited to {sizes['link_mbit']} Mbit/s; bounded, marked ones too, to "
        f"{sizes['in_flight_kb']} KiB under way."
    )
    # What a run was not asked for yet has no row.
    return figures_table(run, {name: mark for name, mark in CLASSES_MARKS.items() if name in run}, conditions)


def _dual_conditions(run: Mapping[str, Any]) -> str:
    """Commands, hardware, workload and commit."""
    parts = [_one_at_a_time(run["dual_settings"])] if "dual_settings" in run else []
    return " ".join([*parts, _agents(run["agents"])] if "agents" in run else parts)


def _agents(found: Mapping[str, Any]) -> str:
    sizes = found["sizes"]
    hurried, paced = ([row for row in found["rows"] if row["load"] == load] for load in ("hurried", "paced"))
    on_s, off_s = _by_kind(hurried, "jct_s")
    said = (
        f"Agents (`python -m benchmark.pd --dual agents`, {place_and_time(found['provenance'])}): "
        f"{sizes['num_agents']} at once with {sizes['num_turns']} "
        f"turns each, first {sizes['first_tokens']} tokens, then {sizes['added_tokens']} more and the answer, of "
        f"{sizes['answer_tokens']}; {sizes['num_rounds']} rounds. A hurried one took {on_s:.1f} s with the dual path "
        f"and {off_s:.1f} s without."
    )
    if not paced:
        return said
    on_s, off_s = _by_kind(paced, "tpot_s")
    return (
        f"{said} Paced ones had {sizes['turns_per_s']} turns a second, of which none began later than "
        f"{1e3 * max(row['latest_s'] for row in paced):.0f} ms after its time; their tokens came {1e3 * on_s:.1f} ms "
        f"apart with the dual path and {1e3 * off_s:.1f} ms without."
    )


def _by_kind(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float]:
    """The mean with the dual path, and without."""
    on, off = (statistics.mean(row[name] for row in rows if row["kind"] == kind) for kind in ("on", "off"))
    return on, off


def _one_at_a_time(settings: Mapping[str, Any]) -> str:
    by_place: dict[str, list[str]] = {}
    for name, setting in settings.items():
        by_place.setdefault(place_and_time(setting["provenance"]), []).append(name)
    runs = "; ".join(f"`python -m benchmark.pd --dual {' '.join(names)}`, {place}" for place, names in by_place.items())
    sizes = next(iter(settings.values()))["sizes"]
    remote_prefetches = sum(setting["counters"]["decode"]["remote_prefetches"] for setting in settings.values())
    failed = sum(setting["counters"]["prefill"]["remote_prefetches_failed"] for setting in settings.values())
    return (
        f"{runs}. {sizes['num_prompts']} prompts of {sizes['prompt_tokens']} tokens, each asked "
        f"in {sizes['num_rounds']} rounds, one at a time; where reads are limited, to {sizes['limit_mb_per_s']:g} "
        f"MB/s. The decode server read for {remote_prefetches} requests; {failed} such reads failed."
    )


def _conditions(run: Mapping[str, Any]) -> str:
    """Command, hardware, workload and commit."""
    sizes = run["sizes"]
    ratios = ", ".join(f"{ratio:.2f}" for ratio in run["ttft_no_hit_ratios"])
    sentences = (
        f"`{' '.join(['python -m benchmark.pd', *_flags(run['config'])])}`, " + place_and_time(run["provenance"]),
        f"{sizes['num_conversations']} conversations of {sizes['num_turns']} turns, first {sizes['first_tokens']} "
        f"tokens, then {sizes['question_tokens']}, answers of {sizes['answer_tokens']}",
        f"Of {run['num_turns_compared']} answers {run['num_turns_identical']} are those of a server alone, and "
        f"{run['num_turns_as_stock_pair']} those of the pair with sharing off",
        f"The answers that a next turn could find have {run['num_answer_pages']} pages",
        f"Time to the first token{_when(run)} of prompts of {run['times']['sizes']['prompt_tokens']} tokens that "
        f"nobody has seen, with Banyan to without, by round: {ratios}",
    )
    return "".join(f"{sentence}. " for sentence in sentences).strip()


def _when(run: Mapping[str, Any]) -> str:
    """Where the times are of a run of their own."""
    place, other = place_and_time(run["times"]["provenance"]), place_and_time(run["provenance"])
    return "" if place == other else f" (`python -m benchmark.pd --times`, {place})"


def _flags(config: Mapping[str, Any]) -> list[str]:
    flags = [f"--{name.replace('_', '-')}" for name in ("quick", "no_networks") if config.get(name)]
    if config.get("conversations") is not None:
        flags.append(f"--conversations {config['conversations']}")
    return flags
