# SPDX-License-Identifier: Apache-2.0
"""``make compat``, over a wheel that a test has packed."""

import importlib.util
import subprocess
import zipfile
from pathlib import Path

import pytest

from banyan import patches

ROOT = Path(__file__).parents[3]


@pytest.fixture
def compat():
    spec = importlib.util.spec_from_file_location("compat_script", ROOT / "scripts" / "compat.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packing(files):
    """Stands in for the package index: a release with these files."""

    def fetched(release, folder):
        wheel = folder / f"sglang-{release}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as made:
            for name, text in files.items():
                made.writestr(name, text)
        return wheel

    return fetched


def queue_of(text):
    """One patch, written against ``text``."""
    (tree,) = patches.ast.parse(text).body
    return [
        patches.Patch(
            name="10-x",
            target="sglang.srt.x.run",
            kind="call",
            processes=("main",),
            why="",
            remove_when="",
            fingerprint=patches.fingerprint(tree),
        )
    ]


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("def run(a):\n    # another comment\n    return a\n", 0, "1 of 1 patches"),
        ("def run(a):\n    return -a\n", 1, "patch 10-x: sglang.srt.x.run has changed"),
        ("def go(a):\n    return a\n", 1, "run is not defined in x.py"),
    ],
)
def test_release_when_it_is_read_then_what_has_drifted_and_the_exit_status(
    compat, monkeypatch, capsys, text, status, said
):
    monkeypatch.setattr(patches, "load_queue", lambda: queue_of("def run(a):\n    return a\n"))
    fetched = packing({"sglang/__init__.py": "", "sglang/srt/x.py": text})
    assert compat.main(["9.9.9"], fetched=fetched) == status
    assert said in capsys.readouterr().out


def test_release_when_the_index_has_none_then_exit_2_and_its_words(compat, capsys):
    def fetched(release, folder):
        raise subprocess.CalledProcessError(1, "pip", stderr="ERROR: No matching distribution")

    assert compat.main(["9.9.9"], fetched=fetched) == 2
    assert "No matching distribution" in capsys.readouterr().err
