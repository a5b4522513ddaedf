# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the CPU engine: pinned memory where no CUDA driver is, and slots that SGLang looks up with Triton.

SGLang asks for pinned memory while it sets adapters (LoRA) up, and where it keeps states, on every device. Pinned
memory speeds copies to a GPU up, and torch refuses it without a driver. Here such requests give plain memory; with a
driver, and on a GPU, nothing changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.allocation import get_last_loc_torch

from banyan_cpu_engine import server

FACTORIES = ("empty", "ones", "tensor", "zeros")


def before_pinned_memory(asking: Any, *args: Any, **kwargs: Any) -> None:
    """Before SGLang makes what asks for it: its LoRAManager, its pool of states."""
    if server.is_on() and not torch.cuda.is_available():
        give_plain_memory()


@server.around
def around_get_last_loc(
    original: Callable[..., torch.Tensor], req_to_token: torch.Tensor, rows: torch.Tensor, prefix_lens: torch.Tensor
) -> torch.Tensor:
    """The slot of each prefix's last token, -1 where there is none."""
    return get_last_loc_torch(req_to_token, rows, prefix_lens)


def give_plain_memory() -> None:
    """From now on this process gets plain memory where it asks torch for pinned. Asked for again, nothing is done."""
    if torch.Tensor.pin_memory is _same:
        return
    torch.Tensor.pin_memory = _same  # type: ignore[method-assign,assignment]
    for name in FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _same(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    return tensor


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    return made
