# SPDX-License-Identifier: Apache-2.0
"""Where digests of weights are remembered, and what is said of reading them."""

import logging
import os
import time
from pathlib import Path

import pytest

from banyan.config import Config
from banyan.layout import file_digests
from banyan.sglang_plugin.rank.store_access import digests_memory, make_budget, weights_digest


@pytest.fixture
def caches(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(file_digests, "SETTLED_NS", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "banyan"


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(5_000_000))
    return str(folder)


def test_memory_when_there_is_no_store_then_it_is_with_the_users_caches(caches):
    config = Config(keep_host_arena="/dev/shm/x", host_gb=1.0)
    assert digests_memory(config) == caches / "weights-digests"


@pytest.mark.parametrize("scheme", ["", "file://", "nixl+posix://"])
def test_memory_when_the_store_has_a_folder_then_it_is_there(caches, tmp_path, scheme):
    store = tmp_path / "store"
    store.mkdir()
    config = Config(store=(f"{scheme}{store}", str(caches)), host_gb=1.0)
    assert digests_memory(config) == caches / "weights-digests", "it may be a mount point without its drive"
    (store / "STORE").touch()
    assert digests_memory(config) == store / "weights-digests"


@pytest.mark.parametrize("store", ["/no/such/folder", "mooncake://127.0.0.1:50051"])
def test_memory_when_the_store_has_no_folder_yet_then_it_is_with_the_users_caches(caches, store):
    assert digests_memory(Config(store=(store,), host_gb=1.0)) == caches / "weights-digests"
    assert not os.path.exists("/no/such/folder"), "the store makes it, or says why not"


def test_memory_when_the_user_has_no_home_then_there_is_none(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert digests_memory(Config()) is None


def test_weights_when_every_rank_asks_then_they_are_read_once_and_that_is_said(caches, model, caplog):
    caplog.set_level(logging.INFO, "banyan")
    config = Config(keep_host_arena="/dev/shm/x", host_gb=1.0)
    told = {weights_digest(config, model, None) for _ in range(4)}
    assert len(told) == 1
    assert [record.message[:34] for record in caplog.records] == ["banyan: weights digested: 0.0 GB i"]


def test_weights_when_nothing_can_be_remembered_then_that_is_said(model, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", model + "/model.safetensors")
    config = Config(keep_host_arena="/dev/shm/x", host_gb=1.0)
    assert weights_digest(config, model, None) == weights_digest(config, model, None)
    assert caplog.text.count("nothing is remembered") == 2


def test_budget_when_the_user_bounds_what_is_written_in_a_day_then_a_rank_has_its_part_of_it():
    budget = make_budget(Config(store_write_gb_per_day=24.0), num_parts=2, share=0.5)
    began_s, two_hours_bytes = time.monotonic(), 1 << 29
    assert budget.take(two_hours_bytes, began_s) and not budget.take(1 << 20, began_s)
    in_an_hour_s = began_s + 3600
    assert budget.take(two_hours_bytes // 2 - 1, in_an_hour_s) and not budget.take(1 << 20, in_an_hour_s)
    assert make_budget(Config(), num_parts=2) is None
