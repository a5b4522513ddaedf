# SPDX-License-Identifier: Apache-2.0
"""A plugin of SGLang that damages Banyan on purpose: a rank offers two states at a time, each in the other's place.

Only for checks: with it tokens must differ, or a state in the wrong place would not be seen.
"""


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.init_cache_linker"
    HookRegistry.register(target, swap_states, HookType.BEFORE)


def swap_states(*args, **kwargs):
    from banyan.sglang_plugin.rank.window_kind import WindowKind

    offer, held = WindowKind.publish, []

    def publish(kind, keys, frames):
        if not held:
            held.append((keys, frames))
            return
        other_keys, other_frames = held.pop()
        offer(kind, other_keys, frames)
        offer(kind, keys, other_frames)

    WindowKind.publish = publish
