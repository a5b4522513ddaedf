# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/benchmarks/network.md, from runs whose figures are kept beside it. Written by ``make docs``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.figures_table import figures_table
from benchmark.kept_table import command_of, kept_page, wrapped
from benchmark.metrics import ranged
from benchmark.provenance import place_and_time

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"
KEPT, FAULTS_KEPT = FOLDER / "remote.json", FOLDER / "remote_faults.json"
SOURCE_KEPT = FOLDER / "remote_source.json"
NIXL_KEPT, NIXL_KILLS_KEPT = FOLDER / "remote_nixl.json", FOLDER / "remote_nixl_kills.json"
"""What ``python -m benchmark.remote`` writes as ``figures.json``, with ``--faults`` as ``faults_figures.json``, with
``--source`` as ``source.json``, with ``--nixl`` as ``nixl_figures.json``, and with both as
``nixl_kills_figures.json``."""

MARKS = {
    "remote_ttft_ratio": "<= 0.35",
    "remote_rate_to_nixl": ">= 0.7",
    "remote_first_layer_share": "<= 0.2",
    "outputs_identical": "true",
}
FAULT_WORDS = {"kill": "killed (SIGKILL)", "stop": "stopped (SIGSTOP)"}


def table() -> str:
    """What another node's arena was worth in the kept run, and where it ran."""
    return kept_page(KEPT, page)


def page(run: Mapping[str, Any]) -> str:
    sizes, note = run["sizes"], run["provenance"].get("note")
    # What was done to the kept file since.
    since = f" Not as that command wrote it: {note}" if note else ""
    conditions = (
        f"`{command_of('benchmark.remote', run['config'])}`, {place_and_time(run['provenance'])}. Two servers "
        f"of one compute thread each, not pinned, {run['num_compared']} prompts of {sizes['prompt_tokens']} tokens, "
        f"one at a time, in {sizes['num_repeats']} repeats; of each {run['remote_token_share']:.0%} came from the "
        f"other node. Bytes of {sizes['link_pages']} pages, by the page server and by NIXL in "
        f"{sizes['num_link_repeats']} turns, over TCP on one host.{since}"
    )
    return figures_table(run, MARKS, conditions)


def faults_table() -> str:
    """What came of sources that were killed or stopped in mid-pull, and where that ran."""
    return kept_page(FAULTS_KEPT, faults_page)


def faults_page(run: Mapping[str, Any]) -> str:
    rows = "\n".join(
        f"| {words} | {run[how]['num_cut']} | {ranged(run[how]['extra_s'])} s | <= {run[how]['most_extra_s']:g} s |"
        for how, words in FAULT_WORDS.items()
    )
    right = "All answers were" if run["outputs_identical"] else "Not all answers were"
    sizes, config = run["sizes"], run["config"]
    command = f"python -m benchmark.remote --faults {config['faults']}" + " --nixl" * bool(config.get("nixl"))
    conditions = (
        f"`{command}`, {place_and_time(run['provenance'])}. Prompts of {sizes['prompt_tokens']} tokens over a path of "
        f"{sizes['mb_per_s']:g} MB/s: from the other node in "
        f"{run['remote_s']:.2f} s, computed in {run['compute_s']:.2f} s. {right} those of the node that lends."
    )
    return (
        "| the source in mid-pull | pulls cut | later than computed at once: median (range) | aim |\n"
        f"|---|---|---|---|\n{rows}\n\n{wrapped(conditions)}\n"
    )


def nixl_kills_table() -> str:
    """The same, where NIXL carries."""
    return kept_page(NIXL_KILLS_KEPT, faults_page)


NIXL_ROWS = {
    "bare_mb_per_s": "a bare READ, MB/s",
    "by_nixl_mb_per_s": "a pull by NIXL, MB/s",
    "tcp_mb_per_s": "a pull over TCP, MB/s",
    "nixl_rate_to_bare": "rate by NIXL to a bare READ (aim: >= 0.9)",
    "nixl_rate_to_tcp": "rate by NIXL to TCP",
    "nixl_first_layer_share": "first layer's share of the transfer by NIXL (aim: <= 0.1)",
    "bare_cpu_s_per_gb": "processor seconds of both ends for a GB: a bare READ",
    "by_nixl_cpu_s_per_gb": "by NIXL",
    "tcp_cpu_s_per_gb": "over TCP",
    "nixl_cpu_to_tcp": "by NIXL to TCP (aim: <= 0.5)",
}


def nixl_table() -> str:
    """What NIXL was worth as a carrier, and where that ran."""
    return kept_page(NIXL_KEPT, nixl_page)


def nixl_page(run: Mapping[str, Any]) -> str:
    rows = "\n".join(
        f"| {words} | {ranged(run['over_tcp'][name])} | {ranged(run['through_memory'][name])} |"
        for name, words in NIXL_ROWS.items()
    )
    sizes = run["sizes"]
    conditions = (
        f"`{command_of('benchmark.remote', run['config'])}`, {place_and_time(run['provenance'])}. "
        f"{sizes['link_pages']} pages of a small model, in {sizes['num_link_repeats']} turns, between two processes on "
        f"one host; pulls are "
        f"verified, a bare READ is not. Of {run['num_drawn_faults']} pulls with drawn faults {run['num_wrong']} took a "
        "wrong byte for a good one."
    )
    return f"| | UCX over TCP | UCX through memory |\n|---|---|---|\n{rows}\n\n{wrapped(conditions)}\n"


SOURCE_MARKS = {
    "source_tpot_ratio": "<= 1.10",
    "source_tpot_ratio_computing": "",
    "pulled_mb_per_s": "",
    "source_tpot_ratio_one_core": "",
    "source_tpot_ratio_computing_one_core": "",
    "pulled_mb_per_s_one_core": "",
}


def source_table() -> str:
    """What lending cost the node that lends in the kept run, and where it ran."""
    return kept_page(SOURCE_KEPT, source_page)


def source_page(run: Mapping[str, Any]) -> str:
    sizes = run["sizes"]
    path = f"a path of {run['link_mbit']} Mbit/s" if "link_mbit" in run else "a loopback that nothing bounds"
    idle_s = statistics.median(row["tpot_s"] for row in run["rows"] if row["kind"] == "idle")
    conditions = (
        f"`python -m benchmark.remote --source`, {place_and_time(run['provenance'])}. Two servers, each with one "
        f"thread that computes, the second on a core of its own; the first gives {sizes['num_answers']} answers of "
        f"{sizes['answer_tokens']} tokens at once, {1e3 * idle_s:.1f} ms a token when the second is idle; the second "
        f"takes prompts of {sizes['lent_tokens']} tokens one after the other, over {path}. {sizes['num_rounds']} "
        "rounds each."
    )
    # Where there is one core, there is one way.
    return figures_table(run, {name: aim for name, aim in SOURCE_MARKS.items() if name in run}, conditions)
