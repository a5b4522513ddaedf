# SPDX-License-Identifier: Apache-2.0
"""``make compat``, over a wheel that a test has packed."""

import ast
import importlib.util
import subprocess
import zipfile
from pathlib import Path

import pytest

from banyan import patches
from banyan.patches import source

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
    """One patch of placement, written against ``text``."""
    (tree,) = ast.parse(text).body
    return [
        patches.Patch(
            name="10-x",
            feature="placement",
            target="sglang.srt.x.run",
            kind="after",
            hook="banyan.sglang_plugin.x:after_run",
            processes=("main",),
            why="",
            remove_when="",
            watches="body",
            fingerprint=source.fingerprint(tree),
        )
    ]


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("def run(a):\n    # another comment\n    return a\n", 0, ["placement: fits", "core: fits", "1 of 1 patches"]),
        (
            "def run(a):\n    return -a\n",
            1,
            [
                "core: fits",
                "placement: 1 of 1 to read again",
                "10-x: sglang.srt.x.run has another body",
                "hook: banyan.sglang_plugin.x:after_run",
                "| -    return a\n",
                "| +    return -a\n",
                "0 of 1 patches",
            ],
        ),
        ("def go(a):\n    return a\n", 1, ["placement: 1 of 1 to read again", "run is not defined in x.py"]),
    ],
)
def test_release_when_it_is_read_then_each_feature_fits_or_names_its_hooks_beside_the_change(
    compat, monkeypatch, capsys, text, status, said
):
    ours = "def run(a):\n    return a\n"
    monkeypatch.setattr(patches, "load_queue", lambda folder=None: [] if folder else queue_of(ours))
    of_release = compat.text_of
    monkeypatch.setattr(
        compat, "text_of", lambda target, *, folder=None: ours if folder is None else of_release(target, folder=folder)
    )
    fetched = packing({"sglang/__init__.py": "", "sglang/srt/x.py": text})
    assert compat.main(["9.9.9"], fetched=fetched) == status
    told = capsys.readouterr().out
    assert [words for words in said if words not in told] == []


def test_release_when_the_index_has_none_then_exit_2_and_its_words(compat, capsys):
    def fetched(release, folder):
        raise subprocess.CalledProcessError(1, "pip", stderr="ERROR: No matching distribution")

    assert compat.main(["9.9.9"], fetched=fetched) == 2
    assert "No matching distribution" in capsys.readouterr().err


def test_release_when_it_is_the_one_that_is_installed_then_every_patch_fits(compat, capsys):
    """Guards are also put on what SGLang only asks for, and its wheel does not have."""
    installed = Path(importlib.util.find_spec("sglang").origin).parent
    queue = [*patches.load_queue(), *patches.load_queue(compat.ENGINE_PATCHES)]
    assert any(one.package != "sglang" for patch in queue for one in patch.sources)
    named = {
        source._file_of(one.target, None)[0] for patch in queue for one in patch.sources if one.package == "sglang"
    }
    files = {f"sglang/{path.relative_to(installed)}": path.read_text() for path in named}
    assert compat.main(["0.5.23"], fetched=packing(files)) == 0
    assert "to read again" not in capsys.readouterr().out
