# SPDX-License-Identifier: Apache-2.0
"""Which index keys can be shared: those of every layer and every token, one row for each page."""

from __future__ import annotations

from typing import Any

from banyan.refusals.models import index_refusal
from banyan.sglang_plugin import runtime


class KeysOfEachToken:
    """In front of SGLang's pool of latents and index keys. Refuses what a page of these does not describe."""

    def __init__(self, *args: Any, index_head_dim: int, **kwargs: Any) -> None:
        line = index_refusal(
            tokens_per_key=kwargs.get("index_kpool", 1),
            num_without=sum(kwargs.get("skip_topk_layers") or ()),
            is_divided=kwargs.get("dcp_replicated", False),
        )
        if line is not None:
            runtime.refuse(line)
        # SGLang sets it behind the latents; their page is to have room for the keys before.
        self.index_head_dim = index_head_dim
        super().__init__(*args, index_head_dim=index_head_dim, **kwargs)  # type: ignore[call-arg]
