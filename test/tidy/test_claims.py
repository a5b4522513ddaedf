# SPDX-License-Identifier: Apache-2.0
"""What the documentation claims is no more than what was measured, as far as a program can tell."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
KEPT = DOCS / "benchmarks"
PAGES = (README, *sorted(DOCS.rglob("*.md")))

TIMES = re.compile(r"TTFT|TPOT|time to first token|latency")
OTHERS = re.compile(r"\bstock\b|router, `?cache_aware|\bHiCache\b|\bLMCache\b")
"""Systems that run another attention backend on a CPU than Banyan does."""

NAMES = {
    "off": "sharing off",
    "on": "sharing on",
    "single": "one rank alone",
}


def tables(path):
    """Each table of a page: its lines, the head first."""
    return [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", path.read_text() + "\n", re.MULTILINE)]


def cells(line):
    return [cell.strip().replace("*", "") for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("page", [README, DOCS / "index.md", DOCS / "gpu.md"], ids=lambda page: page.name)
def test_front_page_when_it_begins_then_it_says_how_little_ran_on_a_gpu(page):
    first_paragraph = " ".join(page.read_text().split("\n\n")[1].split())
    assert "has run on one H200, for minutes and with tiny models" in first_paragraph.replace("*", "")


def test_tables_when_times_stand_beside_those_of_another_system_then_they_say_which_attention_ran():
    """On a CPU the attention backend alone is worth a multiple behind a cached prefix, whoever shares."""
    silent = [
        f"{page.relative_to(ROOT)}: {table[0]}"
        for page in PAGES
        for table in tables(page)
        if TIMES.search(table[0]) and any(OTHERS.search(" ".join(cells(line)[:3])) for line in table[2:])
        if "attention" not in cells(table[0])
    ]
    assert silent == []


def test_kept_run_when_its_checkout_was_dirty_then_a_page_says_so_and_none_hides_it():
    texts = "".join(page.read_text() for page in PAGES)
    commits = {
        commit for path in KEPT.glob("*.json") for commit in re.findall(r'"commit": "([^"]+)"', path.read_text())
    }
    dirty = {commit[:10] for commit in commits if commit.endswith("-dirty")}
    clean = {commit[:10] for commit in commits if not commit.endswith("-dirty")}
    assert dirty and [commit for commit in sorted(dirty) if f"{commit}-dirty" not in texts] == []
    assert [commit for commit in sorted(dirty - clean) if re.search(rf"\b{commit}(?!-dirty)", texts)] == []


def test_readme_when_it_shows_the_published_benchmark_then_its_figures_are_those_of_the_kept_run():
    kept = json.loads((KEPT / "bench.json").read_text())
    assert kept["provenance"]["commit"][:7] in README.read_text()
    (table,) = (table for table in tables(README) if "time to first token" in table[0])
    shown = {cells(line)[0].partition(",")[0]: cells(line)[1:] for line in table[2:]}
    for label, name in NAMES.items():
        figures = kept["labels"][label]["run_2"]
        ttft = figures["ttft_s_mean"]
        spread = f" ({ttft['min']:.1f}-{ttft['max']:.1f})" if figures["num_repetitions"] > 1 else ""
        assert shown[name] == [
            f"{100 * figures['cached_share']['median']:.1f} %",
            f"{ttft['median']:.1f} s{spread}",
            f"{figures['total_time_s']['median']:.0f} s",
        ]


def test_readme_when_it_is_read_then_it_fits_two_screens():
    assert len(README.read_text().splitlines()) <= 80
