# SPDX-License-Identifier: Apache-2.0
"""What SGLang has found for a request, in SGLang's own wrapper of the linker."""

from types import SimpleNamespace

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
from test.sglang_plugin.rank.hooked import hooked

from banyan.sglang_plugin import runtime

MATCH = f"{UnifiedCacheLinkerWrapper.__module__}.UnifiedCacheLinkerWrapper.match"


def test_match_when_the_ranks_own_tree_has_all_by_now_then_what_was_found_elsewhere_is_forgotten(monkeypatch):
    """Nothing takes it away later, where the request is not aborted."""
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    wrapper = object.__new__(UnifiedCacheLinkerWrapper)
    wrapper.cache = SimpleNamespace(tree_core=SimpleNamespace(is_eagle=False), page_size=1)
    wrapper.hit_markers = {"r": "found", "other": "found"}
    match = hooked(MATCH, UnifiedCacheLinkerWrapper.match)
    match(wrapper, RadixKey([1, 2, 3]), SimpleNamespace(rid="r"), SimpleNamespace(device_prefix_len=3))
    assert wrapper.hit_markers == {"other": "found"}
