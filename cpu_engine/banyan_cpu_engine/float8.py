# SPDX-License-Identifier: Apache-2.0
"""KV of eight bits (`--kv-cache-dtype fp8_e4m3`) for attention in plain torch.

On a CPU, SGLang keeps such KV only for the attention kernels of Intel AMX, and refuses it to any other. Its pools of
``float8_e4m3fnuz``, which AMD's GPUs have, are the plain ones, bytes and a view, which torch reads: three bits of
mantissa as well, and values up to 240 instead of 448.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import attention_backends

from banyan_cpu_engine import ATTENTION_BACKEND, server

FLOAT8 = torch.float8_e4m3fnuz


@server.around
def around_configure_kv_cache_dtype(
    original: Callable[..., tuple[str | None, torch.dtype]], **asked: Any
) -> tuple[str | None, torch.dtype]:
    """The name of the KV's type where SGLang has changed it, and the type."""
    name, dtype = original(**asked)
    is_read_by_torch = dtype == torch.float8_e4m3fn and {*attention_backends()} == {ATTENTION_BACKEND}
    return name, FLOAT8 if is_read_by_torch else dtype


def within_range(pool_dtype: torch.dtype, *values: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """``values`` as a pool of ``pool_dtype`` can keep them: what lies beyond its largest number becomes that number.
    Torch would make it no number at all."""
    if pool_dtype != FLOAT8:
        return values
    limit = torch.finfo(FLOAT8).max
    return tuple(None if value is None else value.clamp(-limit, limit) for value in values)
