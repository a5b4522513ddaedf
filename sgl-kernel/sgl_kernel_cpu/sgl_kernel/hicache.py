# SPDX-License-Identifier: Apache-2.0
"""Lets SGLang's HiCache run on the CPU engine, to be measured beside others.

SGLang offers HiCache on GPUs only: it imports the transfers of `sgl_kernel.kvcacheio` where it finds one, and registers
host memory with CUDA. `offer` hands it this stand-in's transfers and plain memory. Nothing calls it by itself:
`benchmark.alternatives` names it as an SGLang plugin for the one server that runs HiCache.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from sgl_kernel import kvcacheio

logger = logging.getLogger(__name__)


def offer() -> None:
    """Put the transfers and the allocation of host memory where SGLang looks for them; says so in the log."""
    from sglang.srt.mem_cache.pool_host import common, mha

    for name in kvcacheio.__all__:
        setattr(mha, name, getattr(kvcacheio, name))
    common.ALLOC_MEMORY_FUNCS["cpu"] = plain_memory
    logger.warning(
        "HiCache on the CPU engine: transfers are the copies of banyan-sgl-kernel-cpu, in the calling thread"
    )


def plain_memory(dims: tuple[int, ...], *, dtype: torch.dtype, device: str, **_: Any) -> torch.Tensor:
    """A host pool of shape ``dims``; where there is no GPU nothing needs to be registered."""
    return torch.empty(dims, dtype=dtype, device=device)
