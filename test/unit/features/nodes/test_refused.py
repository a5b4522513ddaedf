# SPDX-License-Identifier: Apache-2.0
"""A server that cannot deal with other nodes says why before it starts."""

from __future__ import annotations

import pytest

from banyan.config import Config
from banyan.feature import Asked
from banyan.features.nodes import refused


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"a secret of all nodes")
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize("role", [{"listen": "127.0.0.1:7400"}, {"peers": ("127.0.0.1:7400",)}])
def test_carrier_when_nixl_is_not_installed_then_one_line_names_the_flag_and_both_ways_out(role, secret, monkeypatch):
    monkeypatch.setattr(refused.nixl, "is_installed", lambda: False)
    (line,) = refused.refusals(Asked(config=Config(secret_file=secret, carrier="nixl+LIBFABRIC", **role)))
    assert line.startswith("--banyan-carrier nixl+LIBFABRIC: NIXL is not installed: pip install")
    assert line.endswith("or use --banyan-carrier tcp")


@pytest.mark.parametrize(
    ("carrier", "is_installed", "role"),
    [("tcp", False, {"listen": "127.0.0.1:7400"}), ("nixl", True, {"listen": "127.0.0.1:7400"}), ("nixl", False, {})],
    ids=["over tcp", "it is there", "no other nodes"],
)
def test_carrier_when_it_can_be_had_or_is_not_needed_then_nothing_is_refused(
    carrier, is_installed, role, secret, monkeypatch
):
    monkeypatch.setattr(refused.nixl, "is_installed", lambda: is_installed)
    assert refused.refusals(Asked(config=Config(secret_file=secret, carrier=carrier, **role))) == []
