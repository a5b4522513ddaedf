# SPDX-License-Identifier: Apache-2.0
"""What SGLang's scheduler calls when the weights of this rank change, are changing, or have changed in part.

Invariants
  1. No page that was computed with other weights than a namespace names is published in it.
  2. A rank whose last update failed, or whose weights /weights_checker has reset, shares with nobody until an update
     from disk has loaded all of them: nobody knows what it computes with.
  3. Where pages leave the server or outlive it, changed weights are named by their bytes as soon as a change is
     complete, and other servers with equal ones share them. Until then their name is this server's.

States: loaded -> ``begin`` -> changing -> ``end`` -> loaded. A loader without a session goes from loaded to loaded. A
failed loader leads to apart, from any state, but for one that SGLang refuses because no session has begun; only a whole
update from disk leads out of it. While they change, the weights are nobody's: a trainer that writes them over RDMA
calls no loader, so both ends of a session count as a change.
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
from banyan.sglang_plugin.rank.weights_content import UNKNOWN, agreed_digest, own_digest

logger = logging.getLogger("banyan")

_WITHIN_A_SESSION = UpdateWeightsFromDistributedReqInput | UpdateWeightsFromTensorReqInput
"""What SGLang refuses outside one, before anything has changed."""
_COMPLETE = UpdateWeightFromDiskReqInput | UpdateWeightsFromIPCReqInput | EndWeightUpdateReqInput
"""Behind which a trainer has brought all that it wanted to."""


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
    if not runtime.is_sharing():
        return original(updater, command)
    result = _carry_out(original, updater, command)
    if isinstance(command, _COMPLETE) and linker.installed().kinds.full.config.knows_weights:
        _name_weights(updater, result.success)
    return result


def _name_weights(updater: Any, is_whole: bool) -> None:
    """On every shard, whatever became of the command here."""
    rank = linker.installed()
    digest = agreed_digest(own_digest(updater) if is_whole and not rank.is_apart else UNKNOWN, updater.tp_cpu_group)
    if digest:
        rank.weights_are(digest)


def _carry_out(original: Callable[..., Any], updater: Any, command: Any) -> Any:
    if isinstance(command, CheckWeightsReqInput):
        result = original(updater, command)
        if command.action == "reset_tensors":
            # Also where it has failed: half of them may be noise.
            _stand_apart("/weights_checker has reset them")
        return result
    if isinstance(command, BeginWeightUpdateReqInput | EndWeightUpdateReqInput):
        result = original(updater, command)
        if result.success:
            rank = linker.installed()
            rank.is_being_updated = isinstance(command, BeginWeightUpdateReqInput)
            rank.weights_changed(type(command).__name__)
        return result
    if isinstance(command, UpdateWeightFromDiskReqInput):
        # It brings all weights: when it succeeds, it does not matter what was there before. Ahead of it, as it reports
        # the change itself and joins the others' namespace by that.
        linker.installed().meet_again()
    return _load(original, updater, command)


def _load(original: Callable[..., Any], updater: Any, command: Any) -> Any:
    rank = linker.installed()
    epoch = rank.weights_epoch
    result = original(updater, command)
    if rank.weights_epoch != epoch:
        return result
    if result.success:
        # It has not flushed, nor asked whether to: the weights are others all the same.
        rank.weights_changed()
    elif rank.is_being_updated or not isinstance(command, _WITHIN_A_SESSION):
        _stand_apart(f"an update has failed: {result.message}")
    return result


def _stand_apart(reason: str) -> None:
    logger.error(
        "banyan: nobody knows the weights (%s): this rank shares no pages until an update from disk succeeds", reason
    )
    linker.installed().stand_apart()
