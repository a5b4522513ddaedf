# SPDX-License-Identifier: Apache-2.0
"""Commands that give the memory of this rank to others (a trainer, mostly), and take it again, whenever they come.

In SGLang one that comes to ranks with requests ends the server, and so does one that takes what was not given, or a
request that is computed where memory is out.

Invariants
  1. Neither command ends a rank. What is out does not go again, and what is there does not come again, so that either
     may be repeated where some ranks have refused it.
  2. The ranks that step together do alike where they are told in the same step: SGLang has a collective in the middle.
  3. A request that comes while memory is out is refused, but where generation is paused and it waits.
  4. Generation that is told to go on while memory is out goes on when that is there again: requests wait that would be
     computed in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqOutput,
)
from sglang.srt.runtime_context import get_exec

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank.shards import are_commanded_apart

BUSY = (
    "a rank has requests, and its memory stays; that of others may have gone: end what runs (/abort_request, or "
    "/pause_generation with the mode abort or retract) and say it again, or take back what went "
    "(/resume_memory_occupation)"
)
OUT = "the memory of this rank has been given away: it takes requests again after /resume_memory_occupation"
_COMPUTED_IN = (GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS)


def around_command(original: Callable[..., Any], updater: Any, command: Any) -> Any:
    """Either of them."""
    if runtime.config() is None:
        return original(updater, command)
    gives = isinstance(command, ReleaseMemoryOccupationReqInput)
    if gives and not _are_all_idle(updater):
        # The answer has no other field for words. (``launcher.all_ranks`` reads them.)
        return ReleaseMemoryOccupationReqOutput(rid=BUSY)
    named = dict.fromkeys(command.tags or GPU_MEMORY_ALL_TYPES)
    tags = [tag for tag in named if (tag in updater.offload_tags) is not gives]
    if not tags:
        return ReleaseMemoryOccupationReqOutput() if gives else ResumeMemoryOccupationReqOutput()
    answer = original(updater, msgspec.structs.replace(command, tags=tags))
    if updater.scheduler is not None and not gives:
        _go_on(updater.scheduler)
    return answer


def around_generation_command(original: Callable[..., Any], scheduler: Any, command: Any) -> Any:
    """Generation is to pause, or to go on: the last word counts."""
    if runtime.config() is None:
        return original(scheduler, command)
    goes_on = isinstance(command, ContinueGenerationReqInput)
    scheduler.banyan_goes_on = command if goes_on and scheduler._engine_paused and _is_away(scheduler) else None
    return None if scheduler.banyan_goes_on is not None else original(scheduler, command)


def is_out(scheduler: Any) -> bool:
    """Whether a request that comes now would be computed in memory that is not there."""
    return _is_away(scheduler) and (
        not scheduler._engine_paused or getattr(scheduler, "banyan_goes_on", None) is not None
    )


def _is_away(scheduler: Any) -> bool:
    """Whether memory that requests are computed in is."""
    is_given = not scheduler.weight_updater.offload_tags.isdisjoint(_COMPUTED_IN)
    return is_given and bool(get_exec().features.enable_memory_saver)


def _go_on(scheduler: Any) -> None:
    """With what was to go on before its memory was there."""
    command = getattr(scheduler, "banyan_goes_on", None)
    if command is not None and not _is_away(scheduler):
        scheduler.continue_generation(command)


def _are_all_idle(updater: Any) -> bool:
    """Whether SGLang would take the command, at all ranks that step together where they get it in the same step."""
    scheduler = updater.scheduler
    is_idle = updater.is_fully_idle(ignore_waiting=scheduler is not None and scheduler._engine_paused)
    if torch.distributed.get_world_size(updater.tp_cpu_group) == 1 or are_commanded_apart():
        return bool(is_idle)
    verdict = torch.tensor([is_idle], dtype=torch.int32)
    torch.distributed.all_reduce(verdict, torch.distributed.ReduceOp.MIN, group=updater.tp_cpu_group)
    return bool(verdict.item())
