# SPDX-License-Identifier: Apache-2.0
"""Pages of LoRA adapters and what outlives a server: they are kept where their keys name the adapter's content."""

import gc
import tempfile
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from test.sglang_plugin.rank import test_linker as rig
from test.sglang_plugin.rank.matched import Matched
from test.sglang_plugin.rank.test_linker import PAGE, transfer
from test.sglang_plugin.rank.test_requests import inserted

from banyan import _native
from banyan.config import Config
from banyan.sglang_plugin.rank import identity, requests, tier


class Req(Matched):
    """What Banyan reads of a request of SGLang."""

    def __init__(self, rid, lora_id):
        self.rid, self.lora_id = rid, lora_id
        self.extra_key, self.cache_salt = lora_id, None
        self.origin_input_ids, self.output_ids = list(range(2 * PAGE + 1)), []
        self.full_untruncated_fill_ids, self.banyan_asked = self.origin_input_ids, None
        self.dp_max_kv_rank = -1


@pytest.fixture
def rank(monkeypatch):
    """One rank of a server with adapters whose arena is kept."""
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    monkeypatch.setattr(rig, "SERVER", SimpleNamespace(**{**vars(rig.SERVER), "lora_paths": ["a=/adapters/a"]}))
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="banyan-test-") as folder:
        config = Config(min_fetch_tokens=PAGE, host_gb=0.001, keep_host_arena=folder)
        linker, _, pages = rig.make_rank(monkeypatch, _native.RankTable.create(4), 0, config)
        yield linker, pages
        linker.close()


def keep(rank, req):
    """Serve ``req``; its keys."""
    linker, pages = rank
    requests.register(req)
    linker.arrive(requests.id_of(req))
    keys = requests.prompt_keys(requests.id_of(req), PAGE)
    inserted(req, lambda: linker.offload(transfer(keys, pages.alloc(2 * PAGE))))
    return keys


def test_request_when_the_collector_takes_it_then_it_is_forgotten_in_the_next_step_and_not_in_the_middle_of_one(rank):
    linker, _ = rank
    forgotten = []
    linker.cache.forget = linker._planner.forget = forgotten.append
    keep(rank, Req("gone", None))
    gc.collect()
    assert not forgotten
    linker.num_completed_offloads()
    assert len(forgotten) == 2 and forgotten[0] == forgotten[1]


@pytest.mark.parametrize(
    "lasting", [None, "banyan-adapter-" + "a" * 64], ids=["no adapter", "an adapter by its content"]
)
def test_pages_when_they_are_of_an_adapter_that_this_server_named_then_only_others_are_kept(rank, lasting):
    linker, _ = rank
    adapters, others = Req("of an adapter", "a" * 32), Req("other", lasting)
    keys = keep(rank, adapters)
    assert keys != keep(rank, others)
    deadline_s = time.monotonic() + 10
    while linker.counters.kept_pages < 2 and time.monotonic() < deadline_s:
        linker.num_completed_offloads()
        time.sleep(0.001)
    assert linker.counters.kept_pages == linker.state()["num_arena_pages"] == 2
    # They were backed up in order: the adapter's would have come first.
    assert linker.counters.backed_up_pages == 2
    assert linker.counters.published_pages == 4


def test_pages_when_their_request_is_not_known_then_they_are_not_kept(rank):
    linker, pages = rank
    linker.offload(transfer(rig.keys(1), pages.alloc(PAGE)))
    for _ in range(20):
        linker.num_completed_offloads()
        time.sleep(0.005)
    assert linker.counters.published_pages == 1 and linker.counters.backed_up_pages == 0


def test_update_when_no_thread_can_be_made_to_keep_pages_then_that_is_said_and_ranks_go_on_sharing(
    rank, monkeypatch, caplog
):
    linker, _ = rank
    monkeypatch.setattr(tier, "one_thread", Mock(side_effect=RuntimeError("can't start new thread")))
    linker.weights_changed()
    assert "no page of the arena is kept" in caplog.text
    keep(rank, Req("after", None))
    rig.polled_until(linker, lambda: linker.kinds.full.tier.state()["num_arena_pages"] == 2)
