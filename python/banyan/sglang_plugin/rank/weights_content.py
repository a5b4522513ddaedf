# SPDX-License-Identifier: Apache-2.0
"""What names weights that no file names any more, because a trainer has changed them: their bytes.

A rank's KV depends on the weights of all its shards, so all of them must have told theirs: what they agree on is the
same on each. All shards call at once, whatever became of the command on one of them, for each waits for the others.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch
from sglang.srt.managers.mm_utils import tensor_hash

logger = logging.getLogger("banyan")

UNKNOWN = bytes(32)


def own_digest(updater: Any) -> bytes:
    """Of all parameters and persistent buffers of this shard's model, and of its draft; ``UNKNOWN`` where they cannot
    be read. On a GPU SGLang's kernel digests each tensor where it is."""
    try:
        digest = hashlib.sha256()
        for worker in (updater.tp_worker, updater.draft_worker):
            for role, runner in worker.weight_update_runners() if worker is not None else ():
                for name, tensor in sorted(runner.model.state_dict().items()):
                    told = (role, name, str(tensor.dtype), tuple(tensor.shape), tensor_hash(tensor))
                    digest.update(repr(told).encode())
        return digest.digest()
    except Exception as error:  # noqa: BLE001 - whatever a model's tensors raise costs hits, and nothing else
        logger.warning("banyan: updated weights cannot be named, their pages stay with this server: %s", error)
        return UNKNOWN


def agreed_digest(own: bytes, group: Any) -> str:
    """Of what the shards of ``group``, over which CPU tensors go, have told; "" where one of them cannot tell."""
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    told = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(told, mine, group=group)
    shards = [bytes(one.tolist()) for one in told]
    return "" if UNKNOWN in shards else hashlib.sha256(b"".join(shards)).hexdigest()
