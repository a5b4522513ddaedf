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


def test_layers_when_copied_directly_then_only_the_named_slots_change():
    keys, _ = pools()
    copies = [torch.zeros(SLOTS, HEADS, WIDTH) for _ in range(LAYERS)]
    kvcacheio.transfer_kv_direct(keys, copies, slots(3), slots(0), page_size=PAGE)
    for copied, source in zip(copies, keys, strict=True):
        assert torch.equal(copied[slots(0)], source[slots(3)])
        assert not copied[PAGE:].any()


@pytest.mark.parametrize("lengths", [(PAGE, 2 * PAGE), (PAGE - 1, PAGE - 1)], ids=["differ", "half a page"])
def test_transfer_when_slots_are_no_equal_whole_pages_then_refused(lengths):
    keys, values = pools()
    host = torch.zeros(2, HOST_PAGES, LAYERS, PAGE, HEADS, WIDTH)
    source, target = (torch.arange(length) for length in lengths)
    with pytest.raises(ValueError, match="whole pages"):
        kvcacheio.transfer_kv_all_layer_direct_lf_pf(keys + values, [host[0], host[1]], source, target, PAGE)


def test_offer_when_called_then_sglang_finds_transfers_and_memory(caplog):
    from sglang.srt.mem_cache.pool_host import common, mha

    before = {name: vars(mha)[name] for name in kvcacheio.__all__ if name in vars(mha)}
    try:
        hicache.offer()
        assert all(getattr(mha, name) is getattr(kvcacheio, name) for name in kvcacheio.__all__)
        pool = common.ALLOC_MEMORY_FUNCS["cpu"](
            (2, 3), dtype=torch.bfloat16, device="cpu", pin_memory=True, allocator=None
        )
        assert pool.shape == (2, 3) and not pool.is_pinned()
        assert "banyan-sgl-kernel-cpu" in caplog.text
    finally:
        common.ALLOC_MEMORY_FUNCS.pop("cpu", None)
        for name in kvcacheio.__all__:
            delattr(mha, name)
            if name in before:
                setattr(mha, name, before[name])
