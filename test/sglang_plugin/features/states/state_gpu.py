# SPDX-License-Identifier: Apache-2.0
"""Ranks of a GPU server whose model keeps states, over the fake device: SGLang's own pool of states, and its slots."""

from __future__ import annotations

from functools import partial

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from test.sglang_plugin.features.states.test_state_places import FULL, LINEAR, NUM_LAYERS, shared_slots, tensors_of
from test.sglang_plugin.features.windows import window_gpu
from test.sglang_plugin.features.windows.window_gpu import PAGE, TOKENS, GpuWindowRank, Stretch, heads_of
from test.sglang_plugin.rank import test_linker as rig

from banyan.sglang_plugin.pools.device_allocator import DeviceAllocator
from banyan.sglang_plugin.pools.device_pool import DeviceMHAPool

POOL = {name: value for name, value in rig.POOL.items() if name not in ("size", "layer_num", "enable_alt_stream")}


class GpuStateRank(GpuWindowRank):
    """``full`` are its pages' allocator and ``window`` the slots of its states."""

    components = frozenset({ComponentType.FULL, ComponentType.MAMBA})
    num_layers, num_needed, slots_a_page = NUM_LAYERS, 1, 1

    def build_pools(self, monkeypatch):
        self.slots = shared_slots(monkeypatch, is_on_gpu=True)
        self.pool = HybridLinearKVPool(
            size=TOKENS,
            full_attention_layer_ids=FULL,
            mamba_pool=self.slots.mamba_pool,
            full_kv_pool_class=DeviceMHAPool,
            **POOL,
        )
        self.full = self.allocator = DeviceAllocator(TOKENS, PAGE, torch.bfloat16, "cpu", self.pool, False)
        self.window = self.slots.mamba_allocator
        return {"req_to_token_pool": self.slots}

    def tensors(self):
        return [*heads_of(self.pool.full_kv_pool), *tensors_of(self.slots)]

    # ---- what lies in the pools

    def layer(self, layer, full, state):
        """What the layer sees: keys and values, or its state."""
        if layer in LINEAR:
            number = LINEAR.index(layer)
            return torch.cat([tensor[number, state].flatten().float() for tensor in tensors_of(self.slots)])
        heads, number = self.pool.full_kv_pool, FULL.index(layer)
        return torch.stack([heads.k_buffer[number][full], heads.v_buffer[number][full]])

    def buffers(self, part):
        states = [tensor[layer] for tensor in tensors_of(self.slots) for layer in range(len(LINEAR))]
        return states if part else heads_of(self.pool.full_kv_pool)


def by_their_bytes(driver, tensors):
    """A part of a state's is not an allocation of its own."""
    for tensor in tensors:
        driver.gpu.memory[tensor.data_ptr()] = Stretch(tensor.nbytes)


make_node = partial(window_gpu.make_node, kind=GpuStateRank, adopt=by_their_bytes)
