# SPDX-License-Identifier: Apache-2.0
"""The texts of refusals stand in ``banyan/refusals``, and those of a feature in the pure files of its folder: nothing
else that serves tells a user to change a flag."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "python" / "banyan"
ELSEWHERE = ("refusals", "lab", "cli", "observe")
"""``cli`` gives the advice of ``banyan doctor``, ``observe`` that of alerts, each beside what it found."""
WAY_OUT = re.compile(r"\b(use|set|pass|name|raise|lower|start with|start without) --[a-z]")
DESCRIBING = ("knob", "add_argument", "add_parser", "add_argument_group")
"""Calls whose texts are the help of a flag."""


def texts(path):
    """``(line, text)`` of each string that is neither a docstring nor a flag's help."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        or (isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in DESCRIBING)
        for inner in ast.walk(node)
        if not isinstance(node, ast.Expr) or isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def is_of_feature(path):
    parts = path.relative_to(PACKAGE).parts
    return parts[0] == "features" and len(parts) == 3


def test_way_out_when_it_is_told_then_by_refusals_only():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in ELSEWHERE and not is_of_feature(path)
        for line, text in texts(path)
        if WAY_OUT.search(text)
    ]
    assert not found, "\n".join(found)


def test_way_out_when_refusals_are_read_then_most_of_them_have_one():
    """So that the pattern above is one that refusals are written in."""
    told = [text for path in (PACKAGE / "refusals").glob("*.py") for _, text in texts(path) if WAY_OUT.search(text)]
    assert len(told) > 20
