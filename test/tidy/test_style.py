# SPDX-License-Identifier: Apache-2.0
"""The style rules as tests. Each failure prints what the tool said."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
CODE = ("python", "cpu_engine", "lab", "benchmark", "test", "examples")
MAX_FUNCTION_LINES = 70
BANNED_WORDS = ("Manager", "Helper", "Util", "Handler", "Impl", "V2")


def run(*command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param((BIN / "ruff", "check", "--no-cache", *CODE), id="ruff"),
        pytest.param((BIN / "ruff", "format", "--check", "--no-cache", *CODE), id="format"),
        pytest.param((BIN / "mypy",), id="mypy"),
        pytest.param((BIN / "lint-imports",), id="import-contracts"),
    ],
)
def test_python_when_checked_then_clean(command):
    run(*map(str, command))


def test_rust_when_checked_then_formatted():
    cargo = shutil.which("cargo")
    assert cargo, "cargo is not installed"
    run(cargo, "fmt", "--manifest-path", "sgl-kernel/Cargo.toml", "--all", "--check")


def definitions():
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield path.relative_to(ROOT), node


def test_functions_when_measured_then_each_fits_a_screen():
    long = [
        f"{path}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path, node in definitions()
        if not isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def test_classes_when_named_then_without_empty_words():
    bad = [
        f"{path}:{node.lineno} {node.name}"
        for path, node in definitions()
        if isinstance(node, ast.ClassDef) and any(word in node.name for word in BANNED_WORDS)
    ]
    assert not bad, "\n".join(bad)


def test_dicts_when_their_oldest_entry_goes_then_the_rest_is_not_searched_for_it():
    """`banyan.latest` says why."""
    taking = re.compile(r"(del [\w.]+\[|\.pop\()next\(iter\(")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("python", "lab")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if taking.search(line)
    ]
    assert not found, "a plain dict: take Latest, or an OrderedDict\n" + "\n".join(found)


def test_environment_when_read_then_only_by_config():
    """The names are looked for in what is packaged; tests and benchmarks pass environments to what they start."""
    reading = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("python", "cpu_engine", "lab")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "config.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "os.environ" in line or "getenv(" in line
    ]
    assert not reading, "\n".join(reading)


def test_files_when_listed_then_each_names_its_licence():
    missing = [
        str(path.relative_to(ROOT))
        for folder in (*CODE, "sgl-kernel/crates")
        for pattern in ("*.py", "*.rs", "*.pyi")
        for path in sorted((ROOT / folder).rglob(pattern))
        if "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:300]
    ]
    assert not missing, "\n".join(missing)
