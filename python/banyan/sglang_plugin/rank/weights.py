# SPDX-License-Identifier: Apache-2.0
"""What SGLang's scheduler calls when the weights of this rank change, are changing, or have changed in part.

Invariants
  1. No page that was computed with other weights than a namespace names is published in it.
  2. A rank of which one shard's last update failed, or whose weights /weights_checker has reset, shares with nobody
     until an update from disk has loaded all of them, and brought back what was reset: nobody knows what it computes
     with. Nor does one whose shards cannot ask each other what became of an update.
  3. Where pages leave the server or outlive it, changed weights are named by their bytes as soon as a change is
     complete, and other servers with equal ones share them. Until then their name is this server's; and from a load on
     that goes past the model, until an update from disk: what the model derives from its weights may be of others.
  4. Every shard of a server that shares tells the others of a command once, whatever became of it and of Banyan there.

States: loaded -> ``begin`` -> changing -> ``end`` -> loaded. A loader without a session goes from loaded to loaded. A
failed loader leads to apart, from any state, but for one that SGLang refuses because no session has begun; only a whole
update from disk leads out of it. While they change, the weights are nobody's: a trainer that writes them over RDMA
calls no loader, so both ends of a session count as a change, and nothing is published between them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import linker
from banyan.sglang_plugin.rank.weights_content import FAILED, UNKNOWN, agreed_digest, own_digest

logger = logging.getLogger("banyan")

_WITHIN_A_SESSION = UpdateWeightsFromDistributedReqInput | UpdateWeightsFromTensorReqInput
"""What SGLang refuses outside one, before anything has changed."""
_COMPLETE = UpdateWeightFromDiskReqInput | UpdateWeightsFromIPCReqInput | EndWeightUpdateReqInput
"""Behind which a trainer has brought all that it wanted to."""
_BY_THE_MODEL = (None, "flattened_bucket")
"""Formats of tensors that the model's own loader takes; others are written into its parameters."""


def before_flush_after_weight_update(updater: Any, command: Any, success: bool, *args: Any, **kwargs: Any) -> None:
    """A loader has changed the weights of this rank: its pages so far belong to the old ones. One from disk may have
    failed behind the model's weights, at the draft's."""
    if not runtime.is_sharing():
        return
    if success:
        linker.installed().weights_changed()
    else:
        _stand_apart("an update has not loaded all of them")


def around_command(original: Callable[..., Any], updater: Any, command: Any) -> Any:
    """A command that changes the weights: a loader, a session of updates that begins or ends, or a check that resets
    them."""
    config = runtime.config()
    if config is None or not config.shares:
        return original(updater, command)
    is_sharing = runtime.is_sharing()
    if isinstance(command, BeginWeightUpdateReqInput | CheckWeightsReqInput):
        return _begin_or_check(original, updater, command) if is_sharing else original(updater, command)
    epoch = _prepare(command) if is_sharing else 0
    result = original(updater, command)
    told = UNKNOWN
    try:
        told = _follow(updater, command, result, epoch) if is_sharing else _seen_from_outside(command, result)
    finally:
        agreed = agreed_digest(told, updater.tp_cpu_group)
    if is_sharing:
        _heed(agreed)
    return result


def _begin_or_check(original: Callable[..., Any], updater: Any, command: Any) -> Any:
    """What becomes of either is the same on all shards."""
    rank = linker.installed()
    if isinstance(command, BeginWeightUpdateReqInput):
        result = original(updater, command)
        if result.success:
            rank.is_being_updated, rank.has_loaded = True, False
            rank.weights_changed(type(command).__name__)
        return result
    if command.action != "reset_tensors":
        return original(updater, command)
    rank.before_reset = rank.before_reset or own_digest(updater)
    result = original(updater, command)
    # Also where it has failed: half of them may be noise.
    _stand_apart("/weights_checker has reset them")
    return result


def _prepare(command: Any) -> int:
    """How often the weights have changed before the command."""
    rank = linker.installed()
    if isinstance(command, UpdateWeightFromDiskReqInput):
        # It brings all weights: when it succeeds, it does not matter what was there before. Ahead of it, as it reports
        # the change itself and joins the others' namespace by that.
        rank.meet_again()
    return rank.weights_epoch


def _follow(updater: Any, command: Any, result: Any, epoch: int) -> bytes:
    """What this shard tells the others."""
    rank = linker.installed()
    if not isinstance(command, EndWeightUpdateReqInput):
        _follow_loader(updater, command, result, epoch)
    elif result.success:
        rank.is_being_updated = False
        rank.may_be_stale |= not rank.has_loaded
        rank.weights_changed(type(command).__name__)
    if rank.is_apart:
        return FAILED
    is_whole = isinstance(command, _COMPLETE) and result.success and not rank.is_being_updated
    is_named = is_whole and not rank.may_be_stale and rank.kinds.full.config.knows_weights
    return own_digest(updater) if is_named else UNKNOWN


def _follow_loader(updater: Any, command: Any, result: Any, epoch: int) -> None:
    rank = linker.installed()
    if not result.success and not rank.is_being_updated and isinstance(command, _WITHIN_A_SESSION):
        return
    rank.has_loaded = True
    if isinstance(command, UpdateWeightsFromTensorReqInput):
        rank.may_be_stale |= command.load_format not in _BY_THE_MODEL
    if rank.weights_epoch == epoch:
        if result.success:
            # It has not flushed, nor asked whether to: the weights are others all the same.
            rank.weights_changed()
        else:
            _stand_apart(f"an update has failed: {result.message}")
    if isinstance(command, UpdateWeightFromDiskReqInput) and rank.before_reset is not None and not rank.is_apart:
        # It brings what is in files; a check resets buffers that are in none.
        if UNKNOWN != own_digest(updater) == rank.before_reset:
            rank.before_reset = None
        else:
            _stand_apart("they are not what they were before /weights_checker has reset them")


def _seen_from_outside(command: Any, result: Any) -> bytes:
    """What a shard tells that shares nothing: whether a loader was refused or has failed, it cannot say."""
    return UNKNOWN if result.success or isinstance(command, EndWeightUpdateReqInput) else FAILED


def _heed(agreed: bytes) -> None:
    rank = linker.installed()
    if agreed == FAILED:
        if not rank.is_apart:
            _stand_apart(
                "an update has failed at another process of this rank; or these cannot ask each other: drop "
                "--enable-dp-attention-local-control-broadcast"
            )
    elif agreed != UNKNOWN:
        rank.weights_are(agreed.hex())


def _stand_apart(reason: str) -> None:
    logger.error(
        "banyan: nobody knows the weights (%s): this rank shares no pages until an update from disk succeeds", reason
    )
    linker.installed().stand_apart()
