# SPDX-License-Identifier: Apache-2.0
"""Stores that are not Banyan's own files: one server writes, the next one reads, the tokens are those of a server that
shares nothing."""

from __future__ import annotations

import pytest

from benchmark.modes.__main__ import wrong
from benchmark.modes.rows import ONE_RANK, STORE, Mode
from benchmark.modes.run import run
from benchmark.mooncake import Mooncake

pytestmark = pytest.mark.e2e
LENT_BYTES = 256 << 20
LENDER_TTL_S = 600
"""Longer than the test: a lender that stands still is not taken for one that has gone, with all its pages."""


def restarted(name: str, url: str) -> Mode:
    tiers = ("--banyan-host-gb", "0.25", "--banyan-store", url, "--banyan-store-admit", "first")
    return Mode(
        name=name, flags=("--dp", "2", *tiers), verdict="served", alone=ONE_RANK, restarted=True, source="storage"
    )


def test_nixl_when_the_server_was_restarted_then_its_pages_come_with_the_same_tokens(alone, tmp_path):
    mode = restarted("nixl", f"nixl+posix://{STORE}")
    found = run(mode, tmp_path)
    assert wrong(mode, found) is None, found


def test_mooncake_when_the_server_was_restarted_then_its_pages_come_from_who_lends_memory(alone, tmp_path):
    cluster = Mooncake(tmp_path, lent_bytes=LENT_BYTES, ttl_s=LENDER_TTL_S)
    try:
        mode = restarted("mooncake", cluster.url)
        found = run(mode, tmp_path)
    finally:
        cluster.close()
    assert wrong(mode, found) is None, found
