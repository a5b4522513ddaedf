# SPDX-License-Identifier: Apache-2.0
"""A draft's rows belong to the pages of its model: where they lie, who may have them, and when they are there."""

from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs.draft_parallel import DraftParallelLayout
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_hash_str
from test.sglang_plugin.rank import test_extents as extents
from test.sglang_plugin.rank import test_linker as rig
from test.sglang_plugin.rank.matched import Matched
from test.sglang_plugin.rank.test_extents import (
    heads,
    heads_and_draft,
    latents,
    latents_and_drafts,
    make_rank,
    with_drafts,
)
from test.sglang_plugin.rank.test_linker import transfer
from test.sglang_plugin.rank.test_requests import inserted
from test.unit.directory.rig import keys

from banyan import _native
from banyan.config import Config
from banyan.core import Offer
from banyan.sglang_plugin.pools import drafts
from banyan.sglang_plugin.pools.drafts import together
from banyan.sglang_plugin.pools.host_pool import SharedMHAPool
from banyan.sglang_plugin.rank import requests
from banyan.sglang_plugin.runtime import Refused

CONFIG = Config(min_fetch_tokens=4, host_gb=0.0)


def test_draft_when_its_pool_is_made_then_it_lies_behind_the_models_and_is_upstreams():
    pool = heads_and_draft()
    (draft,) = pool.drafts
    theirs = MHATokenToKVPool(**{**extents.HEADS, **extents.SMALL_HEADS, "layer_num": 1}, dtype=torch.bfloat16)
    for mine, other in zip((*draft.k_buffer, *draft.v_buffer), (*theirs.k_buffer, *theirs.v_buffer), strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (other.shape, other.stride(), other.dtype)
        assert not mine.view(torch.uint8).any()
    # What the model's pool says of its memory stays; both say the same of the part that they share.
    pool.k_buffer[0][5].fill_(3)
    front = memoryview(pool.banyan_bytes).cast("B")
    assert memoryview(draft.banyan_bytes).cast("B")[: len(front)] == front
    page = together(pool, pool.drafts).banyan_geometry.page
    assert page.layers[:3] == pool.banyan_geometry.page.layers
    assert [(part.name, part.page_bytes) for part in page.layers[3]] == [("draft keys", 32), ("draft values", 32)]


def test_pool_when_it_has_no_draft_then_it_is_announced_as_it_is():
    pool = heads()
    assert together(pool, ()) is pool


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((heads, {}), id="without a draft"),
        pytest.param((heads_and_draft, {"speculative_draft_model_path": "another"}), id="another draft"),
        pytest.param((heads_and_draft, {"speculative_algorithm": "STANDALONE"}), id="another way to draft"),
    ],
)
def test_page_when_it_has_other_rows_behind_it_then_it_is_not_found(monkeypatch, other):
    """Such a page would be restored as whole, and its draft rows would be nobody's: fewer drafts would be accepted."""
    make, changed = other
    rank_table = _native.RankTable.create(4)
    owner, pool, pages = make_rank(monkeypatch, rank_table, 0, CONFIG, make_pool=heads_and_draft)
    owner.offload(transfer(keys(1, 2), pages.alloc(2 * pool.page_size)))
    monkeypatch.setattr(rig, "SPECULATION", SimpleNamespace(**{**vars(rig.SPECULATION), **changed}))
    reader, *_ = make_rank(monkeypatch, rank_table, 1, CONFIG, make_pool=make)
    assert reader.lookup("r", transfer(keys(1, 2), None)) == []


def test_last_layer_when_a_draft_runs_behind_it_then_it_waits_for_the_drafts_rows_too(monkeypatch):
    rank_table = _native.RankTable.create(4)
    (owner, pool, pages), (reader, own, own_pages) = (
        make_rank(monkeypatch, rank_table, rank, CONFIG, make_pool=extents.filled(latents_and_drafts))
        for rank in (0, 1)
    )
    owner.offload(transfer(keys(1), pages.alloc(pool.page_size)))
    assert reader.lookup("r", transfer(keys(1), None)) == [1]
    assert reader.load("r", transfer(keys(1), own_pages.alloc(own.page_size)))
    batch = reader.start_layer_wise_loading()
    waited = []
    copy = reader.cache.moving(batch)
    monkeypatch.setattr(
        reader.cache, "moving", lambda index: SimpleNamespace(wait_layer=lambda n: waited.append(n) or 0.0)
    )
    reader.layer_done_counter.set_consumer(batch)
    for layer in range(own.layer_num):
        reader.layer_done_counter.wait_until(layer)
    assert waited == [0, 1, 4] and copy.finish()


@pytest.mark.parametrize(
    "own, said",
    [
        pytest.param({"size": 16}, "5 pages of 4 tokens", id="fewer pages"),
        pytest.param({"page_size": 8, "size": 48}, "7 pages of 8 tokens", id="other pages"),
    ],
)
def test_draft_when_its_pages_are_others_then_refused(monkeypatch, capsys, own, said):
    pool = with_drafts(heads(), SharedMHAPool, {**extents.SMALL_HEADS, **own})
    with pytest.raises((SystemExit, Refused)):
        make_rank(monkeypatch, _native.RankTable.create(4), 0, CONFIG, make_pool=lambda: pool)
    line = capsys.readouterr().err
    assert said in line and "--speculative-algorithm" in line and "--banyan-share off" in line


def test_draft_when_its_pool_is_of_another_kind_then_refused(monkeypatch, capsys):
    pool = with_drafts(heads(), MHATokenToKVPool, extents.SMALL_HEADS)
    with pytest.raises((SystemExit, Refused)):
        make_rank(monkeypatch, _native.RankTable.create(4), 0, CONFIG, make_pool=lambda: pool)
    assert "a MHATokenToKVPool" in capsys.readouterr().err


@pytest.mark.parametrize(("num_shards", "is_refused"), [(1, False), (2, True)], ids=["as the model", "otherwise"])
def test_draft_when_its_attention_is_divided_otherwise_than_the_models_then_refused(
    monkeypatch, capsys, num_shards, is_refused
):
    """Ranks of attention data parallelism: a rank is one shard, and SGLang might divide its draft over all of them."""
    monkeypatch.setattr(drafts.runtime, "is_sharing", lambda: True)
    monkeypatch.setattr(drafts.runtime, "is_on_gpu", lambda: True)
    monkeypatch.setattr(drafts, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1))
    worker = SimpleNamespace(draft_parallel_layout=DraftParallelLayout(tp_group=None, attn_tp_size=num_shards))
    made = []
    if not is_refused:
        drafts.around_alloc_memory_pool(made.append, worker)
        assert made == [worker]
        return
    with pytest.raises((SystemExit, Refused)):
        drafts.around_alloc_memory_pool(made.append, worker)
    line = capsys.readouterr().err
    assert "over 2 process(es) and the model's over 1" in line and "--banyan-share off" in line and made == []


def compressed():
    """As the pools of DeepSeek-V4 say of themselves, full and window pages alike."""
    return SimpleNamespace(is_replicated=True)


@pytest.mark.parametrize(
    "make, is_replicated", [(latents, True), (latents_and_drafts, True), (heads, False), (compressed, True)]
)
def test_shards_when_the_heads_of_a_draft_are_divided_then_each_has_pages_of_its_own(monkeypatch, make, is_replicated):
    layout = rig.Layout(dp=1, attn_dp=1, attn_cp=1, attn_tp=2)
    rig.be_rank(monkeypatch, 0)
    parallel = rig.own_slots.get_parallel()
    parallel.dp_size, parallel.attn_tp_size = 1, 2
    pool = make()
    pools = (pool, *getattr(pool, "drafts", ()))
    assert rig.own_slots.member_slots_of(layout, pools).is_replicated == is_replicated
    divided = with_drafts(latents(), SharedMHAPool, extents.SMALL_HEADS)
    assert not rig.own_slots.member_slots_of(layout, (divided, *divided.drafts)).is_replicated


@pytest.fixture
def bigrams():
    requests.look_ahead(1)
    yield
    requests.look_ahead(0)


class Req(Matched):
    """What Banyan reads of a request of SGLang."""

    def __init__(self, num_tokens):
        self.rid, self.extra_key, self.cache_salt, self.lora_id = "r", None, None, None
        self.origin_input_ids, self.output_ids = list(range(100, 100 + num_tokens)), []
        self.banyan_asked, self.dp_max_kv_rank = None, -1


def sglangs_keys(tokens):
    key = RadixKey(array("q", tokens), is_bigram=True).page_aligned(4)
    # SGLang gives a list for pages, and one key for nothing.
    return list(get_hash_str(key, None, page_size=4)) if len(key) else []


@pytest.mark.parametrize("num_tokens", range(12))
def test_prompt_when_keys_are_of_bigrams_then_its_pages_are_those_that_sglang_looks_up(bigrams, num_tokens):
    req = Req(num_tokens)
    requests.register(req)
    # SGLang looks up all tokens but the last.
    theirs = sglangs_keys(req.origin_input_ids[:-1])
    assert requests.prompt_keys(requests.id_of(req), 4) == theirs
    # Nothing of its own, all offered: what lies before that is nothing.
    assert requests.facts(requests.id_of(req), 4).span(len(theirs), Offer((), -1)).origin_tokens == 0


def test_answer_when_keys_are_of_bigrams_then_a_page_is_known_with_the_token_behind_it(bigrams):
    req = Req(6)
    requests.register(req)
    for token in range(8):
        req.output_ids.append(token)
        whole = sglangs_keys([*req.origin_input_ids, *req.output_ids])
        assert inserted(req, lambda: requests.inserted_chain(4)) == whole


def test_draft_when_pages_outlive_the_server_then_it_is_told_by_its_weights(monkeypatch, tmp_path):
    monkeypatch.setattr(rig.identity, "weights_digest", lambda config, path, revision: f"weights of {path}")
    config = Config(min_fetch_tokens=4, host_gb=0.01, store=(str(tmp_path),), store_gb=1.0)
    rank, *_ = make_rank(monkeypatch, _native.RankTable.create(4), 0, config, make_pool=heads_and_draft)
    namespace = rank.kinds.full.namespace()
    rank.close()
    assert namespace.draft[:2] == ("EAGLE", "weights of a-draft") and namespace.weights_sha256 == "weights of a-model"
