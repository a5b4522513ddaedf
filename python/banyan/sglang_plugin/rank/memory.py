# SPDX-License-Identifier: Apache-2.0
"""What SGLang's scheduler calls when the memory of this rank is about to be given to others (a trainer, mostly).

Nothing is to be done when it comes again: SGLang has emptied its tree meanwhile, and the rank shares what it computes
from then on.

Invariants
  1. When the pool goes, nobody reads or writes it: no peer, no copy from or to the tiers below.
  2. Weights that are not kept elsewhere come back as nobody knows what. Nothing that is computed with them is published
     under the name of those that went.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput
from sglang.srt.runtime_context import get_exec

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import linker


def before_release(updater: Any, command: ReleaseMemoryOccupationReqInput) -> None:
    """SGLang asks for idle ranks only, unmaps the pool, and then flushes."""
    if not runtime.is_sharing():
        return
    going = command.tags or GPU_MEMORY_ALL_TYPES
    if GPU_MEMORY_TYPE_KV_CACHE in going:
        linker.installed().withdraw()
    if GPU_MEMORY_TYPE_WEIGHTS in going and _loses_weights():
        linker.installed().weights_changed("release")


def _loses_weights() -> bool:
    features = get_exec().features
    return features.enable_memory_saver and not features.enable_weights_cpu_backup
