# SPDX-License-Identifier: Apache-2.0
"""A plugin of SGLang that damages Banyan on purpose: the window pages of a fetch land in each other's places.

Only for checks: with it tokens must differ, or the check of a model with sliding windows could not fail.
"""


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.init_cache_linker"
    HookRegistry.register(target, mix_windows, HookType.BEFORE)


def mix_windows(*args, **kwargs):
    # SGLang builds the linker next. Window pages are asked for from the end of a prefix on; their places no more.
    from banyan.sglang_plugin.rank.window_kind import WindowKind

    def wanted(windows, keys, slots):
        return list(keys)[::-1], windows.access.frames(slots)

    WindowKind.wanted = wanted
