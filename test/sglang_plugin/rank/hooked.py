# SPDX-License-Identifier: Apache-2.0
"""Upstream functions with the hooks that the patch queue puts on them, without a server."""

from pkgutil import resolve_name

from sglang.srt.plugins.hook_registry import _wrap_fn

from banyan import patches
from banyan.sglang_plugin import hook_queue


def hooked(target, original, queue=None):
    """``original`` in the place of the upstream function ``target``, wrapped as SGLang would wrap that."""
    for patch in patches.load_queue() if queue is None else queue:
        if patch.hook is not None and target in {place.target for place in patch.places}:
            original = _wrap_fn(original, resolve_name(patch.hook), hook_queue.HOOK_TYPES[patch.kind])
    return original
