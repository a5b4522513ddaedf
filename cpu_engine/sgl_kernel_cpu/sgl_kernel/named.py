# SPDX-License-Identifier: Apache-2.0
"""Operators that SGLang takes from ``torch.ops.sgl_kernel`` when one of its modules is imported, to call them or not.

Its processor of images for Qwen's models imports all of Qwen's models, and with them the names of operators that only
the linear attention of Qwen3.5 calls. Without these names it is not registered, and no such model can be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from sgl_kernel.mamba import fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu

OPERATORS = (fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu)
"""Of linear attention: here, and taken by name as well."""

NAMED = (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)


def missing(name: str) -> Callable[..., NoReturn]:
    """What stands for an operator that this package does not have: it can be named, not called."""

    def call(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is not part of the CPU stand-in: turn off the feature that needs it "
            "(Intel AMX, some kinds of speculative decoding) or install a CPU build of sgl-kernel"
        )

    return call


def name_operators() -> None:
    """Let ``torch.ops.sgl_kernel`` have ``OPERATORS``, and a name for each of ``NAMED``, where they have none."""
    operators = torch.ops.sgl_kernel
    for operator in OPERATORS:
        if not hasattr(operators, operator.__name__):
            setattr(operators, operator.__name__, operator)
    for name in NAMED:
        if not hasattr(operators, name):
            setattr(operators, name, missing(name))
