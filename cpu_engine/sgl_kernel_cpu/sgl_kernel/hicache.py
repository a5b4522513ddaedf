# SPDX-License-Identifier: Apache-2.0
"""Lets SGLang's HiCache run on the CPU engine, to be measured beside others.

SGLang offers HiCache on GPUs only: it imports the transfers of `sgl_kernel.kvcacheio` where it finds one, and pins host
memory with CUDA. `offer` hands it this stand-in's transfers and has nothing pinned. Nothing calls it by itself:
`benchmark.alternatives` names it as an SGLang plugin for the one server that runs HiCache.
"""

from __future__ import annotations

import logging
from typing import Any

from sgl_kernel import kvcacheio

logger = logging.getLogger(__name__)


class NotPinned:
    """An attribute that is False whatever is assigned to it."""

    def __get__(self, owner: object, kind: type) -> bool:
        return False

    def __set__(self, owner: object, value: Any) -> None:
        pass


def offer() -> None:
    """Put the transfers where SGLang looks for them, and have host pools of plain memory; says so in the log."""
    from sglang.srt.mem_cache.pool_host import mha

    for name in kvcacheio.__all__:
        setattr(mha, name, getattr(kvcacheio, name))
    mha.MHATokenToKVPoolHost.pin_memory = NotPinned()
    logger.warning(
        "HiCache on the CPU engine: transfers are the copies of banyan-sgl-kernel-cpu, in the calling thread"
    )
