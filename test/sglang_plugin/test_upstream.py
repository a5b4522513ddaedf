# SPDX-License-Identifier: Apache-2.0
"""``docs/upstream.md`` says what SGLang does; its snippets are run here."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "upstream.md"
SNIPPETS = {
    title: code
    for title, code in re.findall(r"^## (.+?)$.*?```python\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.S)
}


@pytest.mark.parametrize("title", SNIPPETS)
def test_point_when_its_snippet_is_run_then_it_still_holds(title):
    exec(compile(SNIPPETS[title], f"{PAGE.name}: {title}", "exec"), {})


def test_page_when_its_points_are_counted_then_each_has_a_snippet():
    assert list(SNIPPETS) == re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
