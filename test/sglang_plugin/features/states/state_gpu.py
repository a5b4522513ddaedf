# SPDX-License-Identifier: Apache-2.0
"""Ranks of a GPU server whose model keeps states, over the fake device: SGLang's own pool of states, and its slots."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from test.sglang_plugin.features.states.test_state_places import FULL, INIT, LINEAR, NUM_LAYERS, make_slots, tensors_of
from test.sglang_plugin.features.windows import window_gpu
from test.sglang_plugin.features.windows.window_gpu import GpuWindowRank, Stretch, WindowDevice, transfer
from test.sglang_plugin.pools.test_device_access import Rank
from test.sglang_plugin.rank import test_linker as rig
from test.sglang_plugin.rank.hooked import hooked

from banyan.features.states.pools import state_pool
from banyan.sglang_plugin.pools import device_start
from banyan.sglang_plugin.pools.device_allocator import DeviceAllocator
from banyan.sglang_plugin.pools.device_pool import DeviceMHAPool
from banyan.sglang_plugin.rank.linker import BanyanLinker

PAGE, TOKENS = rig.PAGE, window_gpu.TOKENS


def device_slots(monkeypatch):
    """SGLang's pool of requests on a GPU, with the hook of the patch queue on it."""
    with monkeypatch.context() as patched:
        patched.setattr(state_pool.runtime, "is_sharing", lambda: True)
        patched.setattr(state_pool.runtime, "is_on_gpu", lambda: True)
        patched.setattr(state_pool.runtime, "config", lambda: None)
        wrapped = hooked(INIT, HybridReqToTokenPool._init_mamba_pool)
        patched.setattr(HybridReqToTokenPool, "_init_mamba_pool", wrapped)
        return make_slots()


class GpuStateRank(GpuWindowRank):
    """``full`` are its pages' allocator and ``window`` the slots of its states."""

    def __init__(self, monkeypatch, gpu, rank_table, number, config, adopt, make_drafts, sizes):
        rig.be_started(monkeypatch, rank_table, number, config)
        Rank.building = self
        self.gpu, self.driver = gpu, WindowDevice(gpu)
        self.schedule, self.forward = 100 * number + 1, 100 * number + 2
        monkeypatch.setattr(device_start, "CudaDriver", lambda: self.driver)
        self.slots = device_slots(monkeypatch)
        kwargs = {
            name: value for name, value in rig.POOL.items() if name not in ("size", "layer_num", "enable_alt_stream")
        }
        self.pool = HybridLinearKVPool(
            size=TOKENS,
            full_attention_layer_ids=FULL,
            mamba_pool=self.slots.mamba_pool,
            full_kv_pool_class=DeviceMHAPool,
            **kwargs,
        )
        heads = self.pool.full_kv_pool
        self.drafts = make_drafts()
        behind = [part for draft in self.drafts for part in (*draft.k_buffer, *draft.v_buffer)]
        buffers = [*heads.k_buffer, *heads.v_buffer, *tensors_of(self.slots), *behind]
        for buffer in buffers:
            buffer.copy_(torch.randn(buffer.shape))
            gpu.memory[buffer.data_ptr()] = Stretch(buffer.nbytes)
        self.full = DeviceAllocator(TOKENS, PAGE, torch.bfloat16, "cpu", self.pool, False)
        self.window = self.slots.mamba_allocator
        self.events = [SimpleNamespace(cuda_event=self.driver.create_event()) for _ in range(2)]
        params = rig.parameters_of(self.full, PAGE, drafts=self.drafts, req_to_token_pool=self.slots)
        monkeypatch.setattr(
            BanyanLinker, "record_offload_ready", lambda linker: linker.forward_stream.owner.record_ready()
        )
        with self.on(self.schedule):
            self.linker = BanyanLinker(
                rig.SERVER,
                params,
                components={ComponentType.FULL, ComponentType.MAMBA},
                extra_config={},
                forward_stream=SimpleNamespace(cuda_stream=self.forward, owner=self),
            )

    # ---- what SGLang calls

    def alloc(self, num_pages, num_states):
        with self.on(self.schedule):
            return self.full.alloc(num_pages * PAGE), self.window.alloc(num_states)

    def offload(self, names, full, state=None):
        """A node of SGLang's tree, and the state at its end where it has one."""
        transfers = [transfer(names, full), *([transfer(names[-1:], state)] if state is not None else [])]
        with self.on(self.schedule):
            assert self.linker.offload(transfers)

    def lookup(self, names, rid="r"):
        with self.on(self.schedule):
            return self.linker.lookup(rid, [transfer(names, None), transfer(names[-1:], None)])

    def load(self, names, rid="r"):
        full, state = self.alloc(len(names), 1)
        with self.on(self.schedule):
            is_taken = self.linker.load(rid, [transfer(names, full), transfer(names[-1:], state)])
        return (full, state) if is_taken else None

    # ---- what lies in the pools

    def layer(self, layer, full, state):
        """What the layer sees: keys and values, or its state."""
        if layer in LINEAR:
            number = LINEAR.index(layer)
            return torch.cat([tensor[number, state].flatten().float() for tensor in tensors_of(self.slots)])
        heads, number = self.pool.full_kv_pool, FULL.index(layer)
        return torch.stack([heads.k_buffer[number][full], heads.v_buffer[number][full]])

    def content(self, full, state):
        return [self.layer(layer, full, state) for layer in range(NUM_LAYERS)]

    def enqueue_write(self, stream, part, slots, value=window_gpu.POISON):
        """A forward that writes pages, or states, one buffer after the other. ``value`` None: noise."""
        heads = self.pool.full_kv_pool
        states = [tensor[layer] for tensor in tensors_of(self.slots) for layer in range(len(LINEAR))]
        for buffer in states if part else (*heads.k_buffer, *heads.v_buffer):

            def write(buffer=buffer):
                buffer[slots] = torch.randn(buffer[slots].shape).to(buffer.dtype) if value is None else value

            self.gpu.enqueue(stream, write)


def make_node(monkeypatch, config, *, seed=0, make_drafts=lambda: ()):
    """The ranks of a server that has just started."""
    monkeypatch.setattr(window_gpu, "GpuWindowRank", GpuStateRank)
    try:
        return window_gpu.make_node(monkeypatch, config, seed=seed, make_drafts=make_drafts)
    finally:
        monkeypatch.setattr(window_gpu, "GpuWindowRank", GpuWindowRank)
