# SPDX-License-Identifier: Apache-2.0
"""The plugin's folders say which process runs them, and no two files of the package import each other in a ring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from banyan import patches

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "python" / "banyan", ROOT / "cpu_engine" / "banyan_cpu_engine", ROOT / "lab" / "banyan_lab")
ROOMS = {"launcher": {"main"}, "dispatcher": {"controller"}, "rank": {"scheduler"}, "pools": {"scheduler"}}


def modules():
    """Every module of the packages by its dotted name."""
    for path in (path for package in PACKAGES for path in sorted(package.rglob("*.py"))):
        (package,) = (package for package in PACKAGES if package in path.parents)
        parts = path.relative_to(package.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports_of(name, path, known):
    """The modules of the package that ``path`` imports anywhere, in functions too; not those for type checkers."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and id(node) not in skipped:
            for alias in node.names:
                target = f"{node.module}.{alias.name}"
                if target in known:
                    yield target
                elif node.module in known and node.module != name:
                    yield node.module


def rings(graph):
    """The strongly connected components of more than one module (Tarjan)."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            ring = stack[at:]
            del stack[at:]
            if len(ring) > 1:
                found.append(sorted(ring))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_files_when_their_imports_are_followed_then_no_ring():
    """Imports in functions count. A package's own ``__init__`` may list what is in it."""
    known = dict(modules())
    graph = {
        name: {target for target in imports_of(name, path, known) if not name.startswith(f"{target}.")}
        for name, path in known.items()
    }
    assert rings(graph) == []


@pytest.mark.parametrize("patch", [patch for patch in patches.load_queue() if patch.hook], ids=lambda patch: patch.name)
def test_hook_when_its_room_is_compared_with_its_processes_then_they_agree(patch):
    module = patch.hook.partition(":")[0].split(".")
    if module[:2] == ["banyan", "features"]:
        assert module[2] == patch.feature
        module = module[1:]
    else:
        assert module[:2] == ["banyan", "sglang_plugin"]
    room = ROOMS.get(module[2])
    if room is None:
        assert len(patch.processes) > 1, f"{patch.hook} runs in the {patch.processes[0]} process only: move it"
    else:
        assert set(patch.processes) == room


@pytest.mark.parametrize("room", ROOMS)
def test_room_when_it_imports_another_then_only_of_its_own_process(room):
    known = dict(modules())
    strangers = [
        f"{name} imports {target}"
        for name, path in known.items()
        if name.startswith(f"banyan.sglang_plugin.{room}") or re.match(rf"banyan\.features\.\w+\.{room}\b", name)
        for target in imports_of(name, path, known)
        for other, processes in ROOMS.items()
        if target.startswith(f"banyan.sglang_plugin.{other}") and processes != ROOMS[room]
    ]
    assert strangers == []
