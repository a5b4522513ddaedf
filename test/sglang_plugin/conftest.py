# SPDX-License-Identifier: Apache-2.0
"""Tests that import SGLang, in this process and without a server. The import takes some ten seconds, once."""

import os
import sys

import pytest

from banyan.config import CPU_ISA_WITHOUT_AMX, OFF_VARIABLE

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
# Read when torch first multiplies.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", CPU_ISA_WITHOUT_AMX)


@pytest.fixture(autouse=True)
def state_of_modules():
    """A process has one rank, so what a rank is told to do is kept in modules. A rank of one test is none of the
    next one's."""
    before = [
        (vars(module), dict(vars(module)))
        for name, module in sys.modules.items()
        if name.startswith("banyan.sglang_plugin.rank")
    ]
    yield
    for names, bound in before:
        names.update((name, value) for name, value in bound.items() if names.get(name) is not value)


@pytest.fixture(autouse=True)
def one_server(monkeypatch):
    """What Banyan's processes say to each other is marked with their server's id."""
    from banyan.sglang_plugin import runtime

    monkeypatch.setattr(runtime, "server_id", lambda: "this server")


@pytest.fixture(autouse=True)
def every_feature_on(monkeypatch):
    """A feature that a test switches off is on again for the next one."""
    from banyan.sglang_plugin import runtime

    monkeypatch.setattr(runtime, "_features_off", set())
    monkeypatch.setenv(OFF_VARIABLE, "")


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch):
    """SGLang has none here, so Banyan is off where a test does not say otherwise: the hooks that some test has had put
    on SGLang's classes, which stay there, pass through in all others."""
    from banyan.sglang_plugin import runtime

    monkeypatch.setattr(runtime, "get_server_args", lambda: None)
