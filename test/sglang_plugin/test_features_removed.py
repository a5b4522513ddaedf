# SPDX-License-Identifier: Apache-2.0
"""Each feature's folder taken away in turn: everything else imports, ranks are put together and share, flags that
need the feature are refused by name, and the tests of the data path pass."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from test import imported

from banyan import feature_list
from banyan.config import Config
from banyan.feature import Asked
from banyan.refusals.models import ModelFacts

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "banyan"
FOLDERS = [feature.name for feature in feature_list.FEATURES if feature.has_folder]
COMMANDS = ("banyan.cli.", "banyan.router")
"""They may use any feature. `banyan route` needs what it is to know of pairs."""

# No server needs "resharding".
NEEDING = {
    "nodes": Asked(config=Config(listen="127.0.0.1:7400", secret_file="secret")),
    "pairs": Asked(config=Config(), disaggregation_mode="prefill"),
    "ray_actors": Asked(config=Config(), args=SimpleNamespace(use_ray=True)),
    "stores": Asked(config=Config(store=("nixl+posix:///store",))),
    "told": Asked(config=Config(told_share=0.2)),
    "tenant_share": Asked(config=Config(tenant_share=0.5, tenant_secret_file="secret")),
    "windows": Asked(config=Config(), model=ModelFacts(architecture="Gemma", has_window=True)),
    "states": Asked(config=Config(), model=ModelFacts(architecture="Qwen", has_states=True)),
}

IMPORT_ALL = """
import importlib, json, pkgutil, sys
import banyan
from banyan import feature_list
gone = []
for module in pkgutil.walk_packages(banyan.__path__, "banyan."):
    if module.name.endswith("__main__") or module.name.startswith("banyan.features." + sys.argv[1]):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        if "banyan.features." + sys.argv[1] in str(error):
            gone.append(module.name)
print(json.dumps([gone, list(feature_list.installed()), [off.name for off in feature_list.absent()]]))
"""

PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
SHARING = (
    "test/unit/test_cache.py",
    "test/sglang_plugin/rank/test_linker.py::test_prefix_when_one_rank_offloads_it_then_the_other_loads_the_same_bytes",
    "test/sglang_plugin/rank/test_weights.py::"
    "test_weights_when_a_trainer_writes_them_without_a_loader_then_old_pages_meet_no_new_ones",
)


@pytest.fixture(params=FOLDERS)
def without(request, tmp_path):
    """The name of a feature, and how to run a program where its folder is not there."""
    shutil.copytree(PACKAGE, tmp_path / "banyan", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "banyan" / "features" / request.param)

    def run(program, *arguments):
        # What tests start finds the package there, too.
        variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
        return imported.run(program, *arguments, paths=[tmp_path, ROOT], variables=variables)

    return request.param, run


def test_feature_when_its_folder_is_gone_then_all_others_are_there_and_ranks_share(without):
    name, run = without
    done = run(IMPORT_ALL, name)
    assert done.returncode == 0, done.stderr
    broken, installed, absent = json.loads(done.stdout.splitlines()[-1])
    assert [module for module in broken if not module.startswith(COMMANDS)] == []
    assert installed == [other for other in FOLDERS if other != name] and absent == [name]
    done = run(PYTEST, "-q", "-x", "-p", "no:cacheprovider", *SHARING)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", NEEDING)
def test_server_when_it_needs_a_feature_that_is_not_installed_then_refused_by_name(name):
    off = {name: (f"banyan.features.{name} is not installed",)}
    (line,) = feature_list.refusals(off, NEEDING[name])
    assert f"Banyan's {name}" in line and f"banyan.features.{name} is not installed" in line
    assert feature_list.refusals(off, Asked(config=Config())) == []


@pytest.mark.parametrize("name", FOLDERS)
def test_feature_when_its_parts_are_read_then_its_page_and_flags_exist(name):
    parts = feature_list.installed()[name]
    assert (ROOT / "docs" / parts.page).is_file()
    assert set(parts.flags) <= set(Config.__dataclass_fields__)
