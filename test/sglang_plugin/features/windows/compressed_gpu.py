# SPDX-License-Identifier: Apache-2.0
"""Ranks of a GPU server whose model keeps its KV compressed, over the fake device: SGLang's own pool of DeepSeek-V4,
with few layers. Where a page lies is told by SGLang's own way from a token's slot to its rows."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools
from sglang.srt.mem_cache.allocator import swa
from test.sglang_plugin.features.windows import window_gpu
from test.sglang_plugin.features.windows.window_gpu import GpuWindowRank

from banyan.config import Config
from banyan.features.windows.pools import compressed_pool
from banyan.sglang_plugin.pools.device_allocator import DeviceAllocator

PAGE, NUM_PAGES, NUM_WINDOW_PAGES = 256, 8, 4
RATIOS = (0, 4, 128, 4)
WINDOW_TOKENS = 128
NUM_REQUESTS = 4
PLAIN = Config(min_fetch_tokens=PAGE, host_gb=0.0, copy_layers_per_launch=1)


def settle(monkeypatch, *, num_draft_tokens=0, fp4=False):
    """What SGLang has resolved when it makes pools."""
    kernel = SimpleNamespace(dsv4_attn_backend="flashmla", enable_deepseek_v4_fp4_indexer=fp4)
    features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
    graph = SimpleNamespace(cuda_graph_config=None)
    algorithm = "EAGLE" if num_draft_tokens else None
    spec = SimpleNamespace(speculative_algorithm=algorithm, speculative_num_draft_tokens=num_draft_tokens)
    monkeypatch.setattr(pools, "get_exec", lambda: SimpleNamespace(kernel=kernel, features=features, graph=graph))
    monkeypatch.setattr(pools, "get_spec", lambda: spec)
    monkeypatch.setattr(pools, "get_platform", lambda: SimpleNamespace(is_sm120=False))
    monkeypatch.setattr(compressed_pool.runtime, "is_on_gpu", lambda: True)


def make_pool(*ratios, **more):
    """As SGLang's configurator asks for one."""
    num_tokens = NUM_PAGES * PAGE
    ring = pools.resolve_compress_state_ring_size(4)
    sizes = {
        "swa_size": NUM_WINDOW_PAGES * PAGE,
        "c4_size": num_tokens // 4,
        "c128_size": num_tokens // 128,
        "full_size": num_tokens,
        "c4_state_pool_size": NUM_WINDOW_PAGES * ring,
        "c128_state_pool_size": 0,
        "max_num_reqs": NUM_REQUESTS,
        "num_req_slots": NUM_REQUESTS + 1,
    }
    return pools.DeepSeekV4TokenToKVPool(
        **sizes | more,
        page_size=PAGE,
        swa_page_size=PAGE,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        sliding_window=WINDOW_TOKENS,
        layer_num=len(ratios),
        start_layer=0,
        end_layer=len(ratios),
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=list(ratios),
    )


def make_draft():
    return make_pool(0, is_draft_worker=True)


def all_tensors(pool):
    """All that it keeps, of requests too."""
    states = [one for one in (*pool.compress_state_pools, *pool.indexer_compress_state_pools) if one is not None]
    return [
        *pool.swa_kv_pool.kv_buffer,
        *(buffer for part in pool.kv_pools.values() for buffer in part.kv_buffer),
        *(buffer for part in pool.index_pools.values() for buffer in part.contiguous_page_row_buffers()),
        *(state.kv_score_buffer.kv_score for state in states),
    ]


def as_bytes(*parts):
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts])


class GpuCompressedRank(GpuWindowRank):
    num_layers, num_needed, page_tokens, slots_a_page = len(RATIOS), 1, PAGE, PAGE

    def build_pools(self, monkeypatch, ratios=RATIOS, replays=False, **settled):
        settle(monkeypatch, **settled)
        monkeypatch.setattr(swa, "current_platform", SimpleNamespace(get_paged_allocator_cls=lambda: DeviceAllocator))
        self.pool = make_pool(*ratios)
        self.allocator = swa.SWATokenToKVPoolAllocator(
            NUM_PAGES * PAGE,
            NUM_WINDOW_PAGES * PAGE,
            PAGE,
            torch.float8_e4m3fn,
            "cpu",
            kvcache=self.pool,
            need_sort=False,
        )
        self.full, self.window = self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator
        return {"swa_retain_window": WINDOW_TOKENS, "decoder_swa_bounded_replay": replays}

    def tensors(self):
        return all_tensors(self.pool)

    def draft_tensors(self):
        return [buffer for draft in self.drafts for buffer in all_tensors(draft)]

    def fill(self, buffer):
        buffer.view(torch.uint8).random_()

    # ---- what lies in the pools

    def layer(self, layer, full, window):
        """All bytes that the layer sees of these tokens: its rows, its indexer's keys, its window, and what its next
        row is made of."""
        return as_bytes(*self.rows(layer, full), *self.window_rows(layer, window))

    def rows(self, layer, full):
        ratio, number, part = self.pool.layer_mapping[layer]
        if not ratio:
            return []
        pages = torch.unique_consecutive(full // ratio // part.page_size)
        index = self.pool.index_pools.get(ratio)
        return [part.kv_buffer[number][pages]] + (
            [] if index is None else [index.contiguous_page_row_buffers()[number][pages]]
        )

    def window_rows(self, layer, window):
        found = [self.pool.swa_kv_pool.kv_buffer[layer][torch.unique_consecutive(window // PAGE)]]
        for states in (self.pool.compress_state_pools, self.pool.indexer_compress_state_pools):
            state = states[layer]
            if state is not None and state.ratio == 4:
                # By the slot of each token; those of a page meet in its ring.
                rows = state.translate_from_swa_loc_to_state_loc(window.clone())
                found.append(state.kv_score_buffer.kv_score[rows.reshape(-1, PAGE)[:, : state.ring_size].flatten()])
        return found

    def of_requests(self):
        """What lies with requests, which no page has."""
        states = [state for state in self.pool.compress_state_pools if state is not None and state.request_scoped]
        return as_bytes(*(state.kv_score_buffer.kv_score for state in states))


make_node = partial(window_gpu.make_node, kind=GpuCompressedRank)
