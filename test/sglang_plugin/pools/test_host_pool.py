# SPDX-License-Identifier: Apache-2.0
"""Shared pools against upstream's: same shapes, strides and page places; other memory."""

import errno
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from banyan.sglang_plugin.pools import host_pool as module
from banyan.sglang_plugin.pools.host_pool import SharedMHAPool, SharedMLAPool
from banyan.sglang_plugin.runtime import Refused

PAGE, TOKENS, LAYERS = 16, 100, 3
COMMON = {"size": TOKENS, "page_size": PAGE, "layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False}
MHA = {**COMMON, "head_num": 3, "head_dim": 64, "enable_alt_stream": False}
MLA = {**COMMON, "kv_lora_rank": 24, "qk_rope_head_dim": 8}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("v_head_dim", [64, 32])
def test_mha_pool_when_it_is_shared_then_shapes_and_strides_are_upstreams(dtype, v_head_dim):
    arguments = {**MHA, "dtype": dtype, "v_head_dim": v_head_dim}
    ours, theirs = SharedMHAPool(**arguments), MHATokenToKVPool(**arguments)
    for name in ("k_buffer", "v_buffer"):
        for mine, other in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            assert (mine.shape, mine.stride(), mine.dtype) == (other.shape, other.stride(), other.dtype)
            assert not mine.view(torch.uint8).any()
    assert ours.get_contiguous_buf_infos()[1:] == theirs.get_contiguous_buf_infos()[1:]


def test_mha_pool_when_a_page_is_written_then_its_bytes_lie_where_the_geometry_says():
    pool = SharedMHAPool(**MHA, dtype=torch.bfloat16)
    raw = memoryview(pool.banyan_bytes).cast("B")
    for layer, extents in enumerate(pool.banyan_geometry.layers):
        for buffer, extent in zip((pool.k_buffer[layer], pool.v_buffer[layer]), extents, strict=True):
            page = buffer[2 * PAGE : 3 * PAGE]
            page.copy_(torch.randn(page.shape))
            start = extent.base_bytes + 2 * extent.page_bytes
            expected = page.contiguous().view(torch.uint8).numpy().tobytes()
            assert bytes(raw[start : start + extent.page_bytes]) == expected


def test_mla_pool_when_a_page_is_written_then_its_bytes_lie_where_the_geometry_says():
    pool, theirs = (kind(**MLA, dtype=torch.bfloat16) for kind in (SharedMLAPool, MLATokenToKVPool))
    raw = memoryview(pool.banyan_bytes).cast("B")
    for layer, (extent,) in enumerate(pool.banyan_geometry.layers):
        buffer = pool.kv_buffer[layer]
        assert (buffer.shape, buffer.stride()) == (theirs.kv_buffer[layer].shape, theirs.kv_buffer[layer].stride())
        page = buffer[PAGE : 2 * PAGE]
        page.copy_(torch.randn(page.shape))
        start = extent.base_bytes + extent.page_bytes
        assert bytes(raw[start : start + extent.page_bytes]) == page.contiguous().view(torch.uint8).numpy().tobytes()


def test_mha_pool_when_memory_is_short_then_it_is_refused_with_the_flag(monkeypatch, capsys):
    def create(num_bytes, label):
        raise OSError(errno.ENOMEM, f"{label}: 1000 bytes are available")

    monkeypatch.setattr(module._native, "SharedBytes", SimpleNamespace(create=create))
    with pytest.raises((SystemExit, Refused)):
        SharedMHAPool(**MHA, dtype=torch.bfloat16)
    assert "--max-total-tokens" in capsys.readouterr().err
