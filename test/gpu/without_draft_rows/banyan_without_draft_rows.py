# SPDX-License-Identifier: Apache-2.0
"""A plugin of SGLang that damages Banyan on purpose: pages travel without the rows of their draft.

Only for checks: with it fewer drafts are accepted, or a check of drafts could not fail. Tokens stay as they are, for
the model verifies every draft.
"""


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.speculative.base_spec_worker.BaseSpecWorker.init_hicache_draft_plan"
    HookRegistry.register(target, leave_draft_rows, HookType.AFTER)


def leave_draft_rows(result, *args, **kwargs):
    # SGLang builds the linker next, and that asks for what peers exchange: of all of the memory the model's part.
    from banyan.sglang_plugin.pools.drafts import Together, together
    from banyan.sglang_plugin.rank import kind

    def without_drafts(pool, drafts):
        whole = together(pool, drafts)
        extents = getattr(pool, "banyan_extents", None)
        return Together(pool.banyan_geometry, pool.device, getattr(whole, "banyan_bytes", None), extents)

    kind.together = without_drafts
    return result
