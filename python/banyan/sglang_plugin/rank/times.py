# SPDX-License-Identifier: Apache-2.0
"""What a rank sets up about time: what it may move where all ranks step together, how long it waits for what readers
hold, and what Banyan itself takes of the scheduler thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from banyan.cache import PrefixCache
from banyan.pacing.lockstep import most_moved_tokens
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.rank import prefill
from banyan.sglang_plugin.rank.planning import RankPlanner
from banyan.sglang_plugin.rank.shards import Shards


def step_together(
    allocators: Sequence[QuarantiningAllocator], planner: RankPlanner, *, token_bytes: int, is_whole_rank: bool
) -> None:
    """Hold to the rules of ``banyan.pacing.lockstep``, in the pool of full pages and in that beside it."""

    for allocator in allocators:
        allocator.is_in_step, allocator.decodes_on_held = True, not is_whole_rank

    # The quarantines of a rank's shards differ, and what depends on one must not decide about a batch of all.
    def most_moved() -> int:
        measured = (planner.decode_us(), planner.token_us()) if is_whole_rank else (None, None)
        return most_moved_tokens(token_bytes, *measured)

    prefill.step_together(most_moved)


def allocate_without_circles(cache: PrefixCache, shards: Shards, allocators: Sequence[QuarantiningAllocator]) -> None:
    """A reader of this rank's pages may be waiting for what it has leased of the reader's. So a load waits for a moment
    only, and the shards of a rank give it up together. What SGLang cannot do without (pages of a prefill or a decode,
    slots of states) is waited for, and then the leases go. No prefill is planned with what a reader holds for long.
    """
    prefill.leave_out(lambda: [allocator.num_uncounted_tokens for allocator in allocators])
    for allocator in allocators:
        allocator.agreed = shards.all
        allocator.is_whole_rank = shards.is_one
        allocator.let_peers_go = cache.give_up


def time_control(owner: object, owner_name: str, names: Sequence[str]) -> None:
    """Measure what these methods of an object take of the scheduler thread."""
    for name in names:
        timed: Callable[..., Any] = runtime.STOPWATCH.wrap(f"{owner_name}.{name.strip('_')}", getattr(owner, name))
        setattr(owner, name, timed)
