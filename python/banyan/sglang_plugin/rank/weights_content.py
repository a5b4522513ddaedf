# SPDX-License-Identifier: Apache-2.0
"""What names weights that no file names any more, because a trainer has changed them: their bytes, and those of what a
model derives from them.

A rank's KV depends on the weights of all its shards, so all of them must have told theirs: what they agree on is the
same on each. All shards call at once, whatever became of the command on one of them, for each waits for the others.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.managers.mm_utils import tensor_hash
from sglang.srt.utils.weight_checker import _is_non_persistent_buffer_name

from banyan.sglang_plugin.rank.shards import are_commanded_apart

logger = logging.getLogger("banyan")

UNKNOWN, FAILED = bytes(32), bytes([255] * 32)
"""What a shard tells that cannot name its weights, and one that has them in part."""


def own_digest(updater: Any) -> bytes:
    """Of all that this shard's model, and its draft, compute with; ``UNKNOWN`` where it cannot be read. On a GPU
    SGLang's kernel digests each tensor where it is."""
    try:
        digest = hashlib.sha256()
        for worker in (updater.tp_worker, updater.draft_worker):
            for role, runner in worker.weight_update_runners() if worker is not None else ():
                for name, tensor in sorted(_tensors(runner.model).items()):
                    told = (role, name, str(tensor.dtype), tuple(tensor.shape), tensor_hash(tensor))
                    digest.update(repr(told).encode())
        return digest.digest()
    except Exception as error:  # noqa: BLE001 - whatever a model's tensors raise costs hits, and nothing else
        logger.warning("banyan: updated weights cannot be named, their pages stay with this server: %s", error)
        return UNKNOWN


def _tensors(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """What is in no file as well, buffers and plain attributes of modules: a model derives it from its weights, and a
    loader may pass that over. But for tables that SGLang makes of the configuration alone, and lets grow; and for the
    slots of adapters, which hold what was asked for lately."""
    beside = dict(model.named_buffers())
    for prefix, module in model.named_modules():
        if isinstance(module, BaseLayerWithLoRA):
            # The layer that it stands around is a module of its own.
            continue
        named = {f"{prefix}.{name}": value for name, value in vars(module).items()}
        beside |= {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    kept = {name: value for name, value in beside.items() if not _is_non_persistent_buffer_name(name)}
    return {**kept, **model.state_dict()}


def agreed_digest(own: bytes, group: Any) -> bytes:
    """Of what the shards of ``group``, over which CPU tensors go, have told. ``FAILED``, or else ``UNKNOWN``, where one
    of them tells so; ``FAILED`` where they cannot ask each other."""
    if are_commanded_apart():
        return FAILED
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    told = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(told, mine, group=group)
    shards = [bytes(one.tolist()) for one in told]
    names_none = next((word for word in (FAILED, UNKNOWN) if word in shards), None)
    return names_none or hashlib.sha256(b"".join(shards)).digest()
