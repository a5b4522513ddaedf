# SPDX-License-Identifier: Apache-2.0
"""Which classes carry KV from a prefill to a decode server: for NIXL and Mooncake Banyan's, for all others SGLang's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.utils import KVClassType, TransferBackend

from banyan.sglang_plugin import runtime

MODULES = {
    TransferBackend.NIXL: "banyan.features.pairs.rank.by_nixl",
    TransferBackend.MOONCAKE: "banyan.features.pairs.rank.by_mooncake",
}


def around_get_kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> type | None:
    module = MODULES.get(transfer_backend)
    if module is None or runtime.config() is None:
        return original(transfer_backend, class_type)
    # Imported here: it is of pairs alone, and needs the engine's package, which only such servers have.
    from banyan.features.pairs.rank.hand_over import receiver_class

    ours = importlib.import_module(module).CLASSES.get(class_type)
    if ours is None:
        return original(transfer_backend, class_type)
    return receiver_class(ours) if class_type is KVClassType.RECEIVER else ours
