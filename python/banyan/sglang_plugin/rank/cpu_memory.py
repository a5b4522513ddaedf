# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the CPU engine: adapters (LoRA) where no CUDA driver is.

SGLang asks for pinned memory while it sets adapters up, on every device. Pinned memory speeds copies to a GPU up, and
torch refuses it without a driver. Here such requests give plain memory; with a driver, and on a GPU, nothing changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from banyan.sglang_plugin import runtime

FACTORIES = ("empty", "ones", "tensor", "zeros")


def before_lora_manager(manager: Any, *args: Any, **kwargs: Any) -> None:
    """Before SGLang's LoRAManager is made."""
    if runtime.config() is not None and not runtime.is_on_gpu() and not torch.cuda.is_available():
        give_plain_memory()


def give_plain_memory() -> None:
    """From now on this process gets plain memory where it asks torch for pinned."""
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
