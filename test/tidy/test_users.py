# SPDX-License-Identifier: Apache-2.0
"""Nothing of the product is alive in tests only, and no two of its files share a name that says nothing.

A name counts as used when code outside its own definition mentions it: product, laboratory, benchmark, scripts, a patch
file, the packaging. Names are matched by spelling, so a dead method whose name is common is not found; what is found is
dead.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "banyan"
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

CALLED_BY_OTHERS = {
    "callback": "pyzmq's authenticator asks whose key may come in",
    "send_kvcache": "SGLang's NIXL manager: its worker calls it for each chunk",
    "transfer_worker": "SGLang's NIXL manager runs it as a thread",
    "set_consumer": "SGLang's layer counter, which LayerWait stands in for",
    "wait_until": "SGLang's layer counter: pools call it before each layer",
}
"""Names that something outside the repository calls, with the reason."""

SAME_NAME_IN_TWO_FOLDERS = {
    "description": "router: what a server says of itself; cuda_ipc: what a rank says of its pool",
    "models": "router: which model a request wants; refusals: which models are refused",
}
"""File names that two folders of the product share because the folders say which is which, with what they say."""


def product_files():
    return sorted(PACKAGE.rglob("*.py"))


def user_files():
    """Whatever may use the product, tests aside."""
    yield from PACKAGE.rglob("*.py")
    for folder in ("cpu_engine", "lab", "benchmark"):
        yield from (ROOT / folder).rglob("*.py")
    for folder in ("scripts", ".ci"):
        yield from (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc")
    yield from (PACKAGE / "patches").glob("*/*.toml")
    yield ROOT / "pyproject.toml"
    yield ROOT / "Makefile"


def mentions(path):
    """How often each word stands in a file as code: names, attributes, and words of short strings."""
    if path.suffix != ".py":
        return Counter(WORD.findall(path.read_text(errors="replace")))
    found = Counter()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            found[node.id] += 1
        elif isinstance(node, ast.Attribute):
            found[node.attr] += 1
        elif isinstance(node, ast.ImportFrom | ast.Import) and path.name != "__init__.py":
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100:
            found.update(WORD.findall(node.value) if path.name != "__init__.py" else ())
    return found


def accesses(path):
    """How often each word stands behind a dot, or in a file that is not Python: how a method is reached."""
    if path.suffix != ".py":
        return Counter(WORD.findall(path.read_text(errors="replace")))
    return Counter(node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute))


def is_override(node, owner):
    """Whether a method answers to a base class, which may call it."""
    return owner is not None and bool(owner.bases) and not ast.unparse(owner.bases[0]).startswith("Protocol")


def public_definitions(path):
    """Functions, classes and methods that others may call, with whether it is a method; protocols only describe."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node, False
        if isinstance(node, ast.ClassDef) and "Protocol" not in {ast.unparse(base) for base in node.bases}:
            for inner in node.body:
                if (
                    isinstance(inner, ast.FunctionDef)
                    and not inner.name.startswith("_")
                    and not is_override(inner, node)
                ):
                    yield inner, True


def uses_within(node, is_method):
    """How often a definition mentions its own name, as calls of itself would."""
    name = node.name
    return sum(
        (isinstance(inner, ast.Attribute) and inner.attr == name)
        or (not is_method and isinstance(inner, ast.Name) and inner.id == name)
        for inner in ast.walk(node)
    )


def test_names_when_their_users_are_counted_then_none_is_for_tests_only():
    mentioned, accessed = Counter(), Counter()
    for path in set(user_files()):
        mentioned.update(mentions(path))
        accessed.update(accesses(path))
    dead = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in product_files()
        for node, is_method in public_definitions(path)
        if (accessed if is_method else mentioned)[node.name] <= uses_within(node, is_method)
        and node.name not in CALLED_BY_OTHERS
    ]
    assert not dead, "nobody but tests calls:\n" + "\n".join(dead)


def test_modules_when_their_importers_are_counted_then_none_is_for_tests_only():
    text = {path: path.read_text(errors="replace") for path in set(user_files())}
    dead = []
    for path in product_files():
        if path.name in ("__init__.py", "__main__.py"):
            continue
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        dotted, parent = ".".join(("banyan", *parts)), ".".join(("banyan", *parts[:-1]))
        imports = re.compile(
            rf"{re.escape(dotted)}\b|from {re.escape(parent)} import \(?[^)]*?\b{parts[-1]}\b", re.DOTALL
        )
        if not any(imports.search(content) for other, content in text.items() if other != path):
            dead.append(str(path.relative_to(ROOT)))
    assert not dead, "nobody but tests imports:\n" + "\n".join(dead)


def test_allowances_when_checked_then_each_is_still_needed():
    names = {node.name for path in product_files() for node, _ in public_definitions(path)}
    assert set(CALLED_BY_OTHERS) <= names


def test_files_when_two_share_a_name_then_their_folders_are_known_to_say_which_is_which():
    folders = defaultdict(list)
    for path in product_files():
        if path.stem not in ("__init__", "__main__"):
            folders[path.stem].append(str(path.parent.relative_to(PACKAGE)))
    shared = {stem: places for stem, places in folders.items() if len(places) > 1}
    assert {stem: places for stem, places in shared.items() if stem not in SAME_NAME_IN_TWO_FOLDERS} == {}
    assert set(SAME_NAME_IN_TWO_FOLDERS) <= set(shared), "an allowance that is not needed"
