# SPDX-License-Identifier: Apache-2.0
"""A model whose KV is compressed (DeepSeek-V4) on a GPU, with the fake driver and SGLang's own pool: all that a prefix
consists of comes from a peer, the arena and the store, byte for byte."""

import pytest
import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from test.sglang_plugin.features.windows import compressed_gpu
from test.sglang_plugin.features.windows.compressed_gpu import (
    PAGE,
    PLAIN,
    RATIOS,
    make_draft,
    make_node,
    make_pool,
)
from test.sglang_plugin.features.windows.test_windows_on_gpu import go_on_until, tiers
from test.sglang_plugin.features.windows.window_gpu import equal, let_the_device_run, publish
from test.sglang_plugin.rank import test_linker as rig
from test.unit.directory.rig import keys

from banyan.config import Config
from banyan.features.windows.pools import compressed_pool
from banyan.layout.page import COMPRESSOR_STATES, INDEX_KEYS, INDEXER_STATES
from banyan.sglang_plugin.runtime import Refused

SEEDS = range(5)
ARENA = Config(min_fetch_tokens=PAGE, host_gb=0.03)


@pytest.fixture
def ranks(monkeypatch):
    return make_node(monkeypatch, PLAIN)


def last_window(window):
    return window[-PAGE:]


def fetched(reader, names, ranks):
    assert reader.lookup(names) == [len(names)]
    own = reader.load(names)
    assert reader.land()
    let_the_device_run(ranks)
    return own


def test_prefix_when_a_peer_has_it_then_every_byte_that_a_layer_sees_comes(ranks):
    owner, reader = ranks
    names = keys(1, 2, 3)
    full, window = publish(owner, names)
    expected = owner.content(full, last_window(window))
    before = reader.of_requests()
    own = fetched(reader, names, ranks)
    assert equal(reader.content(*own), expected)
    assert torch.equal(reader.of_requests(), before), "what lies with requests is theirs"


def test_prefix_when_a_row_or_a_state_of_one_layer_stays_behind_then_it_is_seen(ranks):
    """The comparison that the others rest on sees each buffer."""
    owner, _ = ranks
    full, window = publish(owner, keys(1, 2))
    expected = owner.content(full, window)
    of_pages = {*owner.pool.get_contiguous_buf_infos()[0], *owner.pool.get_state_buf_infos()[0]}
    of_pages = [buffer for buffer in owner.tensors() if buffer.data_ptr() in of_pages]
    assert len(of_pages) == len(RATIOS) + (2 + 1) + 2 + 2 * 2
    for buffer in of_pages:
        kept = buffer.clone()
        buffer.view(torch.uint8).bitwise_not_()
        assert not equal(owner.content(full, window), expected)
        buffer.copy_(kept)
    assert equal(owner.content(full, window), expected)


def test_page_when_a_layer_compresses_then_its_rows_are_of_a_full_page_and_its_windows_states_of_a_window_page(ranks):
    full, window = (kind._page for kind in ranks[0].linker.kinds)
    assert [[part.name for part in parts] for parts in full.layers] == [
        ["latents of 4", INDEX_KEYS],
        ["latents of 128"],
        ["latents of 4", INDEX_KEYS],
    ]
    assert [COMPRESSOR_STATES in dict.fromkeys(part.name for part in parts) for parts in window.layers] == [
        ratio == 4 for ratio in RATIOS
    ]
    assert sum(part.name == INDEXER_STATES for parts in window.layers for part in parts) == RATIOS.count(4)


def layers_are_right(monkeypatch, seed, tamper):
    """Whether each layer of a forward has seen the owner's bytes, in an order of the device's of this seed."""
    owner, reader = ranks = make_node(monkeypatch, PLAIN, seed=seed)
    pages = reader.linker.kinds.beside[0].pages
    pages._reached = tamper(pages._reached)
    names = keys(1, 2)
    full, window = publish(owner, names)
    expected = owner.content(full, last_window(window))
    assert reader.lookup(names) == [2]
    own_full, own_window = reader.load(names)
    index, seen = reader.start(), {}
    for layer in range(len(RATIOS)):
        reader.wait_until(layer)
        reader.gpu.enqueue(
            reader.forward,
            lambda layer=layer: seen.setdefault(layer, reader.layer(layer, own_full, own_window)),
        )
    assert reader.finish(index)
    let_the_device_run(ranks)
    return equal([seen[layer] for layer in range(len(RATIOS))], expected)


def test_layer_when_a_forward_reads_it_then_both_of_its_copies_have_been_waited_for(monkeypatch):
    """Each layer but the first is one of both kinds."""
    assert all(layers_are_right(monkeypatch, seed, lambda reached: reached) for seed in SEEDS)


@pytest.mark.parametrize("kind", [0, 1], ids=["rows", "windows"])
def test_layer_when_it_waits_for_one_kind_alone_then_some_order_shows_it(monkeypatch, kind):
    def without(reached):
        return [tuple(count * (number != kind) for number, count in enumerate(counts)) for counts in reached]

    assert not all(layers_are_right(monkeypatch, seed, without) for seed in SEEDS)


def test_prefix_when_its_last_window_page_was_freed_then_the_longest_that_has_one_is_offered(ranks):
    owner, reader = ranks
    publish(owner, keys(1, 2))
    publish(owner, keys(3), num_windowed=0)
    assert reader.lookup(keys(1, 2, 3)) == [2]


def test_draft_when_it_predicts_tokens_then_its_windows_come_with_the_models(monkeypatch):
    def make_drafts():
        return (make_draft(),)

    owner, reader = ranks = make_node(monkeypatch, PLAIN, make_drafts=make_drafts, num_draft_tokens=4)
    names = keys(1, 2)
    full, window = publish(owner, names)
    own_full, own_window = fetched(reader, names, ranks)
    assert equal(reader.content(own_full, own_window), owner.content(full, last_window(window)))
    (mine,), (theirs,) = reader.drafts, owner.drafts
    page, own_page = int(window[-1]) // PAGE, int(own_window[-1]) // PAGE
    assert torch.equal(mine.swa_kv_pool.kv_buffer[0][own_page], theirs.swa_kv_pool.kv_buffer[0][page])


def test_index_keys_when_they_are_of_four_bits_then_they_come_and_are_other_pages(monkeypatch, ranks):
    owner, reader = fp4 = make_node(monkeypatch, PLAIN, fp4=True)
    names = keys(1, 2)
    full, window = publish(owner, names)
    own = fetched(reader, names, fp4)
    assert equal(reader.content(*own), owner.content(full, last_window(window)))
    assert owner.linker.kinds.full._page.identity() != ranks[0].linker.kinds.full._page.identity()


def test_arena_when_the_pools_have_given_pages_up_then_all_of_both_kinds_comes_from_it(monkeypatch):
    owner, reader = ranks = make_node(monkeypatch, ARENA)
    names = keys(1, 2, 3)
    full, window = publish(owner, names)
    held = owner.content(full, last_window(window))
    go_on_until(owner, lambda: all(tier.state()["num_arena_pages"] == 3 for tier in tiers(owner)))
    owner.free(full, window)
    let_the_device_run(ranks)
    reader.meet_peers()
    assert equal(reader.content(*fetched(reader, names, ranks)), held)


def test_store_when_a_server_has_ended_then_the_next_one_has_every_byte(monkeypatch, tmp_path):
    monkeypatch.setattr(rig.identity, "weights_digest", lambda config, path, revision: "weights")
    names = keys(1, 2, 3)
    monkeypatch.setattr(rig.module.requests, "prompt_keys", lambda request, page_tokens: names)
    monkeypatch.setattr(rig.module.requests, "is_of_this_server", lambda request: False)
    config = Config(min_fetch_tokens=PAGE, host_gb=0.03, store=(str(tmp_path),), store_gb=0.1, store_admit="first")
    (first,) = make_node(monkeypatch, config, num_ranks=1)
    first.linker.arrive("learnt")
    full, window = publish(first, names)
    held = first.content(full, last_window(window))
    go_on_until(first, lambda: first.linker.counters.archived_pages == 2 * len(names))
    first.linker.close()

    (second,) = make_node(monkeypatch, config, num_ranks=1)
    second.linker.arrive("r")
    assert second.lookup(names) == [3]
    own = second.load(names)
    assert second.finish(second.enqueue_forward())
    go_on_until(second, lambda: second.linker.counters.read_pages == len(names) + 1)
    assert equal(second.content(*own), held)
    second.linker.close()


# ---- pools that are not known


def refused(monkeypatch, capsys, **more):
    with pytest.raises((SystemExit, Refused)):
        make_node(monkeypatch, PLAIN, num_ranks=1, **more)
    return capsys.readouterr().err


def test_pool_when_sglang_hands_over_another_buffer_then_refused(monkeypatch, capsys):
    original = DeepSeekV4TokenToKVPool.get_state_buf_infos

    def with_another(pool):
        return tuple([*part, 4096] for part in original(pool))

    monkeypatch.setattr(DeepSeekV4TokenToKVPool, "get_state_buf_infos", with_another)
    assert "1 buffers): use --banyan-share off" in refused(monkeypatch, capsys)


def test_pool_when_it_has_fewer_pages_than_the_allocator_hands_out_then_refused(monkeypatch, capsys):
    monkeypatch.setattr(compressed_gpu, "make_pool", lambda *ratios: make_pool(*ratios, swa_size=PAGE))
    assert "2 pages for 4 and a dummy" in refused(monkeypatch, capsys)


def test_windows_when_late_layers_have_those_of_a_prompts_end_only_then_refused(monkeypatch, capsys):
    """As DeepSeek-V4.1's."""
    assert "compressed KV out in a way that is not known here" in refused(monkeypatch, capsys, replays=True)


def test_windows_when_several_rows_make_a_page_then_refused(monkeypatch, capsys):
    """As on SM120, where these weigh as much, in another order."""
    monkeypatch.setattr(compressed_gpu, "make_pool", lambda *ratios: in_rows_of_64(make_pool(*ratios)))
    assert "compressed KV out in a way that is not known here" in refused(monkeypatch, capsys)


def in_rows_of_64(pool):
    pool.swa_kv_pool.page_size = 64
    return pool


def test_rows_when_states_round_in_another_way_then_the_namespace_is_another(ranks):
    (rank, _), (pool,) = ranks, [ranks[0].linker.kinds.full.pools.pool]
    for state in rank.pool.compress_state_pools:
        if state is not None:
            state.kv_score_buffer.kv_score = state.kv_score_buffer.kv_score.to(torch.bfloat16)
    assert compressed_pool._layout_of(rank.pool) != pool.kv_cache_layout


def test_draft_when_it_compresses_too_then_refused(monkeypatch, capsys):
    line = refused(monkeypatch, capsys, make_drafts=lambda: (make_pool(4),), num_draft_tokens=4)
    assert "the draft's KV pool cannot travel with the model's" in line


def test_pools_when_they_are_not_on_a_gpu_then_refused(monkeypatch, capsys):
    settle = compressed_gpu.settle

    def on_a_host(monkeypatch, **settled):
        settle(monkeypatch, **settled)
        monkeypatch.setattr(compressed_pool.runtime, "is_on_gpu", lambda: False)

    monkeypatch.setattr(compressed_gpu, "settle", on_a_host)
    assert "compressed KV out in a way that is not known here" in refused(monkeypatch, capsys)
