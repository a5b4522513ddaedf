# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/network.md, from runs whose figures are kept beside it. Written by ``make docs``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.figures_table import figures_table
from benchmark.kept_table import command_of, wrapped
from benchmark.metrics import ranged
from benchmark.provenance import place_and_time

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"
KEPT, FAULTS_KEPT = FOLDER / "remote.json", FOLDER / "remote_faults.json"
SOURCE_KEPT = FOLDER / "remote_source.json"
"""What ``python -m benchmark.remote`` writes as ``figures.json``, with ``--faults`` as ``faults_figures.json``, and
with ``--source`` as ``source.json``."""

NONE_KEPT = "No run is kept here yet.\n"
MARKS = {
    "remote_ttft_ratio": "<= 0.35",
    "remote_rate_to_nixl": ">= 0.7",
    "remote_first_layer_share": "<= 0.2",
    "outputs_identical": "true",
}
FAULT_WORDS = {"kill": "killed (SIGKILL)", "stop": "stopped (SIGSTOP)"}


def table() -> str:
    """What another node's arena was worth in the kept run, and where it ran."""
    return page(json.loads(KEPT.read_text())) if KEPT.exists() else NONE_KEPT


def page(run: Mapping[str, Any]) -> str:
    sizes = run["sizes"]
    conditions = (
        f"`{command_of('benchmark.remote', run['config'])}`, {place_and_time(run['provenance'])}. Two servers on a "
        f"core each, {run['num_compared']} prompts of {sizes['prompt_tokens']} tokens, one at a time, in "
        f"{sizes['num_repeats']} repeats; of each {run['remote_token_share']:.0%} came from the other node. Bytes of "
        f"{sizes['link_pages']} pages, by the page server and by NIXL in {sizes['num_link_repeats']} turns, over TCP "
        "on one host."
    )
    return figures_table(run, MARKS, conditions)


def faults_table() -> str:
    """What came of sources that were killed or stopped in mid-pull, and where that ran."""
    return faults_page(json.loads(FAULTS_KEPT.read_text())) if FAULTS_KEPT.exists() else NONE_KEPT


def faults_page(run: Mapping[str, Any]) -> str:
    rows = "\n".join(
        f"| {words} | {run[how]['num_cut']} | {ranged(run[how]['extra_s'])} s | <= {run[how]['most_extra_s']:g} s |"
        for how, words in FAULT_WORDS.items()
    )
    right = "All answers were" if run["outputs_identical"] else "Not all answers were"
    sizes = run["sizes"]
    conditions = (
        f"`python -m benchmark.remote --faults {run['config']['faults']}`, {place_and_time(run['provenance'])}. "
        f"Prompts of {sizes['prompt_tokens']} tokens over a path of {sizes['mb_per_s']:g} MB/s: from the other node in "
        f"{run['remote_s']:.2f} s, computed in {run['compute_s']:.2f} s. {right} those of the node that lends."
    )
    return (
        "| the source in mid-pull | pulls cut | later than computed at once: median (range) | aim |\n"
        f"|---|---|---|---|\n{rows}\n\n{wrapped(conditions)}\n"
    )


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
    return source_page(json.loads(SOURCE_KEPT.read_text())) if SOURCE_KEPT.exists() else NONE_KEPT


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
