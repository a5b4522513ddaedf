# SPDX-License-Identifier: Apache-2.0
"""The documentation is a site without a dead link, and names commands and counters that are there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from banyan import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OUTSIDE = ("README.md", "CONTRIBUTING.md", "benchmark/README.md", "cpu_engine/README.md", "lab/README.md")


def test_site_when_it_is_built_strictly_then_no_warning_and_every_page(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert pages <= {path.relative_to(tmp_path) for path in tmp_path.rglob("*.html")}
    # Nothing is fetched from elsewhere.
    start = (tmp_path / "index.html").read_text()
    assert re.findall(r'<(?:script|link)[^>]+(?:src|href)="https?://[^"]+"', start) == []


def anchors(path):
    """The anchors of a page's headings, as GitHub and the site make them."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", OUTSIDE)
def test_page_outside_the_site_when_its_links_are_followed_then_each_leads_somewhere(name):
    page = ROOT / name
    dead = []
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        path = (page.parent / target) if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            dead.append(f"{target}#{anchor}")
    assert dead == []


def test_runbook_when_it_names_counters_then_somebody_counts_them():
    text = (DOCS / "runbook.md").read_text()
    named = {word for word in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", text)}
    source = "".join(path.read_text() for path in (ROOT / "python" / "banyan").rglob("*.py"))
    source += "".join(path.read_text() for path in (ROOT / "sgl-kernel" / "crates").rglob("*.rs"))
    missing = [word for word in sorted(named) if word not in source and word.removeprefix("placed_") not in source]
    assert missing == []


def test_pages_when_they_are_read_then_each_begins_with_its_title_and_says_something():
    texts = {path: path.read_text() for path in DOCS.rglob("*.md")}
    assert sorted(path.name for path, text in texts.items() if not text.startswith(("# ", "---\n"))) == []
    assert sorted(path.name for path, text in texts.items() if len(text.split()) < 50) == []


def test_pages_when_they_name_a_command_then_it_is_there(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = set(re.findall(r"^    ([a-z]+) ", capsys.readouterr().out, re.MULTILINE))
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    named = {
        (path.name, word)
        for path in pages
        for word in re.findall(r"(?:`|^    )banyan ([a-z]+)", path.read_text(), re.MULTILINE)
    }
    assert sorted((page, word) for page, word in named if word not in commands) == []


def test_pages_when_they_name_a_make_target_then_it_is_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    named = {
        (path.name, word)
        for path in pages
        for word in re.findall(r"(?:`|^    )make ([a-z-]+)", path.read_text(), re.MULTILINE)
    }
    assert sorted((page, word) for page, word in named if word not in targets) == []


def test_links_when_they_leave_the_documentation_then_the_path_of_a_file_that_is_there():
    spec = importlib.util.spec_from_file_location("site_script", ROOT / "scripts" / "site.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    warnings = []
    page = DOCS / "design" / "0010-store.md"
    cache = "../../python/banyan/cache.py"
    text = f"[a](../gpu.md) [the rule]({cache}) [`cache.py`]({cache}) [x](../../no.py)"
    said = site.followed(text, page, lambda *words: warnings.append(words))
    assert said == ("[a](../gpu.md) the rule (`python/banyan/cache.py`) `python/banyan/cache.py` [x](../../no.py)")
    assert len(warnings) == 1 and "../../no.py" in warnings[0]
