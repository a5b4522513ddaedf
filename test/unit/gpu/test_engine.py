# SPDX-License-Identifier: Apache-2.0
"""How ``make gpu-check`` starts a server on a machine on which Banyan is not installed."""

import importlib.metadata

from test.gpu import engine

from banyan import __version__

GROUP = "sglang.srt.plugins"


def test_plugin_paths_when_banyan_is_not_installed_then_sglang_finds_the_same_entry_point(tmp_path, monkeypatch):
    (installed,) = importlib.metadata.distribution("banyan").entry_points.select(group=GROUP)

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    paths = engine.plugin_paths(tmp_path / "plugin")
    (found,) = importlib.metadata.distributions(path=[paths[-1]])
    (written,) = found.entry_points.select(group=GROUP)
    assert found.version == __version__
    assert (written.name, written.value) == (installed.name, installed.value)


def test_plugin_paths_when_banyan_is_installed_then_nothing_is_written(tmp_path):
    engine.plugin_paths(tmp_path / "plugin")
    assert not (tmp_path / "plugin").exists()
