# SPDX-License-Identifier: Apache-2.0
"""What stands for an image, a video or a sound in a prompt is made of all that its KV depends on.

SGLang makes it of the pixels alone, as they lie in memory. Two plain pages, one upright and one across, have the same
pixels then, and so have the same frames shown faster: their tokens would be the same, and so would the keys of their
pages, while positions, and what an encoder makes of them, are not. Whoever has named an item's hash has the last word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from banyan.sglang_plugin import runtime

MAX_VALUES = 1 << 16
"""Of one datum beside the pixels: shapes, masks and times have fewer. What has more is made of the pixels."""


def around_set_pad_value(original: Callable[[Any], None], item: Any) -> None:
    """In the process that makes a prompt's numbers, or at the rank: where SGLang does it first."""
    is_named = item.pad_value is not None or item.hash is not None
    original(item)
    if is_named or not runtime.is_sharing():
        return
    beside = b"".join(_beside(item))
    if beside:
        digest = hashlib.sha256(item.hash.to_bytes(8, "big") + beside).digest()
        item.set_hash(int.from_bytes(digest[:8], "big"))


def after_get_validated_mm_data(sent: Any, *args: Any, **kwargs: Any) -> None:
    """What an encoder elsewhere has sent says what pictures become, and no shape: their positions say as much of it as
    KV depends on."""
    if sent.mrope_positions is None or not runtime.is_sharing():
        return
    for item in sent.mm_items:
        digest = hashlib.sha256()
        for start, end in item.offsets or ():
            digest.update(sent.mrope_positions[:, start : end + 1].contiguous().cpu().numpy().tobytes())
        item.set("banyan_positions", int.from_bytes(digest.digest()[:8], "big", signed=True))


def _beside(item: Any) -> Iterator[bytes]:
    """What an item says beside its pixels, each with its name."""
    for name, value in sorted(item.model_specific_data.items()):
        numbers = _numbers(value)
        if numbers:
            yield name.encode() + b"=" + numbers


def _numbers(value: Any) -> bytes:
    """Of a number, several, or lists of such, so that no two have the same; nothing of what is none."""
    if isinstance(value, list | tuple):
        parts = [_numbers(part) for part in value] if len(value) <= MAX_VALUES else []
        return b"(" + b",".join(parts) + b")" if any(parts) else b""
    if isinstance(value, torch.Tensor):
        if value.numel() > MAX_VALUES:
            return b""
        # numpy has no bfloat16.
        plain = value.detach().cpu()
        value = plain.double().numpy() if plain.is_floating_point() else plain.numpy()
    if not isinstance(value, np.ndarray | np.generic | int | float):
        return b""
    array = np.asarray(value)
    is_known = array.dtype.kind in "biuf" and array.size <= MAX_VALUES
    return f"{array.dtype.str}{array.shape}:".encode() + array.tobytes() if is_known else b""
