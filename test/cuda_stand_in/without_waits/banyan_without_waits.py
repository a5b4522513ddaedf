# SPDX-License-Identifier: Apache-2.0
"""A plugin of SGLang that damages Banyan on purpose: no layer waits for the copy of its pages.

Only for checks: with it tokens must differ, or the stand-in would not show a wait that is missing.
"""


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.init_cache_linker"
    HookRegistry.register(target, take_waits_out, HookType.BEFORE)


def take_waits_out(*args, **kwargs):
    from banyan.transport.cuda_ipc.copies import CudaCopy

    CudaCopy.wait_layer = lambda copy, layer: 0.0
