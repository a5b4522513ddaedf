# SPDX-License-Identifier: Apache-2.0
"""HiCache's transfers in the stand-in for `sgl_kernel`: what goes down comes up again, page by page."""

from __future__ import annotations

import pytest
import torch
from sgl_kernel import hicache, kvcacheio

LAYERS, PAGE, HEADS, WIDTH = 3, 4, 2, 5
SLOTS, HOST_PAGES = 8 * PAGE, 6


def pools():
    """Keys and values of each layer, all numbers different."""
    numbers = torch.arange(2 * LAYERS * SLOTS * HEADS * WIDTH, dtype=torch.float32)
    layers = numbers.reshape(2 * LAYERS, SLOTS, HEADS, WIDTH)
    return list(layers[:LAYERS].clone()), list(layers[LAYERS:].clone())


def slots(*pages):
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def test_pages_when_copied_down_and_up_elsewhere_then_equal_layer_by_layer():
    keys, values = pools()
    host = torch.zeros(2, HOST_PAGES, LAYERS, PAGE, HEADS, WIDTH)
    kvcacheio.transfer_kv_all_layer_direct_lf_pf(
        keys + values, [host[0], host[1]], slots(6, 1), slots(0, 5), page_size=PAGE
    )
    for layer in range(LAYERS):
        up = [torch.zeros(SLOTS, HEADS, WIDTH) for _ in range(2)]
        kvcacheio.transfer_kv_per_layer_direct_pf_lf(
            [host[0], host[1]], up, slots(5, 0), slots(2, 3), layer_id=layer, page_size=PAGE
        )
        for found, source in zip(up, (keys, values), strict=True):
            assert torch.equal(found[slots(2, 3)], source[layer][slots(1, 6)])
            assert not found[slots(0, 1, 4)].any()


@pytest.mark.parametrize("lengths", [(PAGE, 2 * PAGE), (PAGE - 1, PAGE - 1)], ids=["differ", "half a page"])
def test_transfer_when_slots_are_no_equal_whole_pages_then_refused(lengths):
    keys, values = pools()
    host = torch.zeros(2, HOST_PAGES, LAYERS, PAGE, HEADS, WIDTH)
    source, target = (torch.arange(length) for length in lengths)
    with pytest.raises(ValueError, match="whole pages"):
        kvcacheio.transfer_kv_all_layer_direct_lf_pf(keys + values, [host[0], host[1]], source, target, PAGE)


@pytest.fixture
def offered():
    """SGLang's module of host pools after the offer; as it was, afterwards."""
    from sglang.srt.mem_cache.pool_host import mha

    before = dict(vars(mha))
    hicache.offer()
    yield mha
    del mha.MHATokenToKVPoolHost.pin_memory
    for name in kvcacheio.__all__:
        delattr(mha, name)
        if name in before:
            setattr(mha, name, before[name])


def host_pool(mha, keys, values):
    """SGLang's host pool for these layers, of `HOST_PAGES` pages."""
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope

    k_data_ptrs, v_data_ptrs = (
        torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64) for layers in (keys, values)
    )
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(keys), v=tuple(values), k_data_ptrs=k_data_ptrs, v_data_ptrs=v_data_ptrs, layout=KVBufferLayout.NHD
        ),
        page_size=PAGE,
        head_num=HEADS,
        head_dim=WIDTH,
        v_head_dim=WIDTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(1 << 20):
        return mha.MHATokenToKVPoolHost(
            info,
            host_to_device_ratio=1.0,
            host_size=0,
            page_size=PAGE,
            layout="page_first_direct",
            device_capacity_tokens=SLOTS,
            host_token_capacity=HOST_PAGES * PAGE,
            start_layer=0,
            end_layer=LAYERS,
        )


def test_pool_of_sglang_when_offered_then_a_page_goes_down_to_a_file_and_up_again(offered):
    keys, values = pools()
    pool = host_pool(offered, keys, values)
    pool.backup_from_device_all_layer(None, slots(2), slots(5), "direct")
    bytes_of_page = pool.get_data_page(2 * PAGE)
    # What reads files asks for a page of memory first; pinned, it would need a GPU.
    read = pool.get_dummy_flat_data_page()
    read.copy_(bytes_of_page)
    pool.set_from_flat_data_page(0, read)
    expected = [layer[slots(5)].clone() for layer in (*keys, *values)]
    for layer in (*keys, *values):
        layer.zero_()
    for layer in range(LAYERS):
        pool.load_to_device_per_layer(None, slots(0), slots(1), layer, "direct")
    for found, wanted in zip((*keys, *values), expected, strict=True):
        assert torch.equal(found[slots(1)], wanted)


def test_offer_when_called_then_it_says_so(offered, caplog):
    hicache.offer()
    assert "banyan-sgl-kernel-cpu" in caplog.text
