# SPDX-License-Identifier: Apache-2.0
"""The documentation says what the code says."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

from benchmark import ceiling, policy_table
from benchmark.alternatives import traces
from benchmark.pressure import workloads

ROOT = Path(__file__).parents[2]
MAX_COLUMNS = 120


def made_pages():
    spec = importlib.util.spec_from_file_location("docs_script", ROOT / "scripts" / "docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_when_parts_are_made_from_code_then_they_are_up_to_date(tmp_path):
    """As `make docs` starts it, wherever that is done."""
    command = [sys.executable, ROOT / "scripts" / "docs.py", "--check"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, f"run `make docs`: {done.stdout}{done.stderr}"


def test_parts_when_listed_then_each_is_on_some_page():
    texts = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert [name for name in made_pages().PARTS if f"<!-- made: {name} -->" not in texts] == []


def prose_lines(path):
    """The lines of a page that are sentences: no tables, no code, no headings, nothing made from code."""
    in_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith(("|", "#", "    ", "<!--")):
            yield number, line


def test_prose_when_it_is_measured_then_no_line_is_wider_than_the_code():
    folders = (ROOT / name for name in ("docs", "benchmark", "cpu_engine", "lab"))
    pages = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]
    wide = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"
        for path in pages
        for number, line in prose_lines(path)
        if len(line) > MAX_COLUMNS
    ]
    assert wide == []


def test_recorded_files_when_a_benchmark_wants_one_then_its_readme_says_where_it_comes_from():
    options = (*traces.RECORDED.values(), *policy_table.TRACES.values())
    wanted = {word for words in options for word in words if word.endswith(".gz")}
    wanted |= {*ceiling.TRACES, *workloads.SOURCES.values()}
    text = (ROOT / "benchmark" / "README.md").read_text()
    assert len(wanted) == 4 and [name for name in sorted(wanted) if f"| `{name}` | " not in text] == []


def test_gpu_page_when_it_names_sglangs_kernels_then_in_the_version_that_the_pinned_release_wants():
    (wanted,) = (needed for needed in importlib.metadata.requires("sglang") if needed.startswith("sglang-kernel"))
    assert wanted in (ROOT / "docs" / "gpu.md").read_text()
