# SPDX-License-Identifier: Apache-2.0
"""A plugin of SGLang that damages Banyan on purpose: pages travel without their index keys.

Only for a check: with it tokens must differ, or the check of a model with an indexer could not fail.
"""


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_dsa_kv_pool"
    HookRegistry.register(target, leave_index_keys, HookType.AFTER)


def leave_index_keys(pool, *args, **kwargs):
    from banyan.sglang_plugin.pools.device_pool import DeviceDSAPool, describe_buffers
    from banyan.sglang_plugin.pools.pages import page_of_latents

    if isinstance(pool, DeviceDSAPool):
        layers = [((rows, pool.page_size),) for rows in pool.kv_buffer]
        pool.banyan_geometry, pool.banyan_extents = describe_buffers(page_of_latents(pool), layers)
    return pool
