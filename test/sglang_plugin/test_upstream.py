# SPDX-License-Identifier: Apache-2.0
"""``docs/upstream.md`` says what SGLang does; its snippets are run here."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "upstream.md"
QUEUES = [ROOT / "python/banyan/patches", ROOT / "cpu_engine/banyan_cpu_engine/patches"]
SNIPPETS = {
    title: code
    for title, code in re.findall(r"^## (.+?)$.*?```python\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.S)
}


@pytest.mark.parametrize("title", SNIPPETS)
def test_point_when_its_snippet_is_run_then_it_still_holds(title):
    exec(compile(SNIPPETS[title], f"{PAGE.name}: {title}", "exec"), {})


def test_page_when_its_points_are_counted_then_each_has_a_snippet():
    assert list(SNIPPETS) == re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)


def test_page_when_it_names_patches_then_each_is_in_a_queue():
    named = set(re.findall(r"\b\d\d-[a-z]+(?:-[a-z]+)*", PAGE.read_text()))
    queued = {patch.stem for queue in QUEUES for patch in queue.rglob("*.toml")}
    assert named and named <= queued, named - queued
