# SPDX-License-Identifier: Apache-2.0
"""What SGLang looks for and has found for a request, in SGLang's own wrapper of the linker."""

from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
from test.sglang_plugin.rank.hooked import hooked
from test.sglang_plugin.rank.matched import Matched

from banyan.sglang_plugin import runtime

MATCH = f"{UnifiedCacheLinkerWrapper.__module__}.UnifiedCacheLinkerWrapper.match"


@pytest.fixture(autouse=True)
def sharing(monkeypatch):
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)


def request(**asked):
    req = Matched()
    req.rid = "r"
    vars(req).update(asked)
    return req


def test_match_when_the_ranks_own_tree_has_all_by_now_then_what_was_found_elsewhere_is_forgotten():
    """Nothing takes it away later, where the request is not aborted."""
    wrapper = object.__new__(UnifiedCacheLinkerWrapper)
    wrapper.cache = SimpleNamespace(tree_core=SimpleNamespace(is_eagle=False), page_size=1)
    wrapper.hit_markers = {"r": "found", "other": "found"}
    match = hooked(MATCH, UnifiedCacheLinkerWrapper.match)
    match(wrapper, RadixKey(array("q", [1, 2, 3])), request(), SimpleNamespace(device_prefix_len=3))
    assert wrapper.hit_markers == {"other": "found"}


@pytest.mark.parametrize(
    ("limit", "asked", "looked_for"),
    [(None, {}, 31), (31, {}, 31), (16, {}, 16), (None, {"return_logprob": True, "logprob_start_len": 8}, 8)],
)
def test_match_when_a_policy_looks_at_whole_prompts_then_no_further_than_when_the_request_s_turn_comes(
    limit, asked, looked_for
):
    match = hooked(MATCH, lambda wrapper, key, req, result: len(key))
    wrapper, key = SimpleNamespace(hit_markers={}), RadixKey(array("q", range(32)), limit=limit)
    assert match(wrapper, key, request(**asked), None) == looked_for
