# SPDX-License-Identifier: Apache-2.0
"""Which classes carry KV from a prefill to a decode server: for NIXL Banyan's, for all others SGLang's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.utils import KVClassType, TransferBackend

from banyan.sglang_plugin import runtime


def around_get_kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> type | None:
    if transfer_backend is not TransferBackend.NIXL or runtime.config() is None:
        return original(transfer_backend, class_type)
    # Imported here: it needs NIXL's package, which only such servers have.
    from banyan.features.pairs.rank import nixl

    if class_type is KVClassType.MANAGER:
        return nixl.BanyanNixl
    if class_type is KVClassType.SENDER:
        return nixl.BanyanKVSender
    if class_type is KVClassType.RECEIVER:
        return nixl.receiver_class()
    return original(transfer_backend, class_type)
