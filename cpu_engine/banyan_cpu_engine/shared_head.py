# SPDX-License-Identifier: Apache-2.0
"""A draft takes over its model's embedding and head. SGLang's DeepSeek then asks CUDA to settle, on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from banyan_cpu_engine import server


@server.around
def around_set_embed_and_head(
    original: Callable[..., None], draft: Any, embed: torch.nn.Parameter, head: torch.nn.Parameter
) -> None:
    """The same tables for both: they are the model's own."""
    draft.model.embed_tokens.weight = embed
    draft.lm_head.weight = head
