# SPDX-License-Identifier: Apache-2.0
"""One file carries the check to a machine without a package index."""

import os
import stat
import subprocess
import sys

import pytest
from test.gpu import bundle

CHECK = """#!/usr/bin/env bash
echo "steps: $*"; echo "path: $PYTHONPATH"; echo "model: $MODEL_PATH"; cat shared.txt
"""


@pytest.fixture
def packed(tmp_path):
    root = tmp_path / "repository"
    written = {
        "scripts/gpu_check.sh": CHECK,
        "shared.txt": "as it lies there\n",
        "python/banyan/_native.abi3.so": "native",
        "build/models/tiny/wide/config.json": "{}",
        "site/there.py": "",
    }
    for name, text in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "scripts/gpu_check.sh").chmod(0o755)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "scripts", "shared.txt"], cwd=root, check=True)
    files = [*bundle.repository_files(root), *bundle.model_files(root, ["wide"])]
    # One package that every machine with pytest has, and one that none has.
    files += [(root / "site/there.py", "site/pytest/there.py"), (root / "site/there.py", "site/no-such/there.py")]
    target = tmp_path / "bundle.sh"
    assert bundle.pack(target, files, known_as="abc-dirty") == target.stat().st_size
    return target


def unpacked(packed, folder, *words):
    folder.mkdir(exist_ok=True)
    variables = {name: value for name, value in os.environ.items() if not name.endswith("MODEL_PATH")}
    environment = {**variables, "PYTHON": sys.executable, "PYTHONPATH": "", "CDPATH": "/"}
    command = ["bash", str(packed), *words]
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def test_bundle_when_it_runs_elsewhere_then_the_check_does_with_what_came_along(packed, tmp_path):
    folder = tmp_path / "elsewhere"
    for _ in range(2):  # A second time over what the first has unpacked.
        said = unpacked(packed, folder, "first", "bench")
        assert "steps: first bench" in said and "as it lies there" in said and "abc-dirty" in said
        assert f"model: {folder}/banyan-gpu-check/build/models/tiny/wide" in said
    assert (folder / "banyan-gpu-check/python/banyan/_native.abi3.so").read_text() == "native"
    assert packed.stat().st_mode & stat.S_IXUSR


def test_bundle_when_an_older_one_was_unpacked_there_then_its_files_are_gone_and_results_stay(packed, tmp_path):
    folder, older = tmp_path / "elsewhere" / "banyan-gpu-check", tmp_path / "older.sh"
    gone, result = folder / "python/banyan/patches/core/40-gone.toml", folder / "build/gpu/report.json"
    with_more = [(tmp_path / "repository" / name, name) for name in ("scripts/gpu_check.sh", "shared.txt")]
    with_more += [(tmp_path / "repository/site/there.py", name) for name in (str(gone.relative_to(folder)), "site/x/y")]
    bundle.pack(older, with_more, known_as="older")
    unpacked(older, folder.parent)
    result.parent.mkdir(parents=True)
    result.touch()
    assert gone.exists()
    unpacked(packed, folder.parent)
    assert not gone.exists() and result.exists() and (folder / "shared.txt").exists()


def test_bundle_when_the_machine_has_a_package_then_its_own_is_used(packed, tmp_path):
    said = unpacked(packed, tmp_path / "elsewhere")
    (path,) = [line for line in said.splitlines() if line.startswith("path: ")]
    assert "site/no-such" in path and "site/pytest" not in path


def test_packages_when_listed_then_with_what_they_require_and_without_what_sglang_brings():
    names = bundle.closure(["pytest", "hypothesis"])
    assert {"pytest", "pluggy", "iniconfig", "hypothesis", "sortedcontainers"} <= set(names)
    assert not bundle.SGLANGS.intersection(names)
    files = dict(bundle.package_files("sortedcontainers"))
    assert all(name.startswith("site/sortedcontainers/") for name in files.values())
    assert any(name.endswith("METADATA") for name in files.values()) and all(path.is_file() for path in files)
