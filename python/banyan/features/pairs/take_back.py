# SPDX-License-Identifier: Apache-2.0
"""What a decode server takes back from its arena, so that a prefill server need not send it.

Invariants
  1. Pages are promised under their lease: from the promise on they stay what and where they are.
  2. A promise that nobody has begun is let go in the same step of the scheduler.
  3. Nothing writes pages of the pool any more when they are given up: ``settle`` comes before.
  4. A request goes on when all that was promised is in. If it does not come, the request fails; and that prompt is not
     promised again for a while.

States of a take-back: promised -> ``begin`` -> copying -> in, or failed. It is let go where it was not begun, and has
failed where there was no place for it. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

from banyan.features.pairs.roles import Role
from banyan.latest import Latest
from banyan.layout import Layout
from banyan.ports import Copy, Frames, Lease, Peers
from banyan.telemetry import Counters

MAX_DOUBTED = 256
"""Prompts remembered whose take-back has failed."""


def can_take_back(role: Role, layout: Layout, *, has_arena: bool, num_pools: int, is_on_gpu: bool) -> bool:
    """Whether a rank takes pages back. Not where its shards might find different pages; nor where more than one pool
    goes with a page (windows, states, drafts); nor on a GPU, where nothing orders such a copy behind the forward that
    had the pages before; nor where ranks step together."""
    is_alone = layout.attn_tp * layout.attn_cp == 1 and not layout.steps_together
    return role is Role.DECODE and has_arena and is_alone and num_pools == 1 and not is_on_gpu


class State(StrEnum):
    PROMISED = "promised"
    COPYING = "copying"
    IN = "in"
    FAILED = "failed"
    LET_GO = "let go"


class TakeBack:
    """One request's."""

    def __init__(self, lease: Lease, prompt: str) -> None:
        """``prompt``: the key of its last page."""
        self.state = State.PROMISED
        self.num_pages = lease.num_pages
        self.prompt = prompt
        self._lease = lease
        self._copy: Copy | None = None

    @property
    def is_open(self) -> bool:
        return self.state in (State.PROMISED, State.COPYING)

    def begin(self, start_copy: Callable[[Lease], Copy]) -> None:
        """There is a place for the pages."""
        assert self.state is State.PROMISED
        self._copy = start_copy(self._lease)
        self.state = State.COPYING

    def has_no_place(self) -> None:
        """The pool has nothing to copy into."""
        assert self.state is State.PROMISED
        self.let_go()
        self.state = State.FAILED

    def let_go(self) -> None:
        """Nobody relies on the promise."""
        if self.state is State.PROMISED:
            self._lease.release()
            self.state = State.LET_GO

    def look(self) -> None:
        """See whether the copy has ended. Never waits."""
        if self._copy is not None and self.state is State.COPYING and self._copy.has_ended:
            self.settle()

    def settle(self) -> None:
        """Wait until nothing is written any more: the time of a copy."""
        if self.state is State.COPYING:
            assert self._copy is not None
            self.state = State.IN if self._copy.finish() else State.FAILED
            self._copy = None


class TakeBacks:
    """All of one rank."""

    def __init__(self, peers: Callable[[], Peers], arenas: Sequence[int], counters: Counters) -> None:
        """``peers``: those of the present weights. ``arenas``: slots of the arena's parts."""
        self._peers = peers
        self._arenas = arenas
        self._counters = counters
        self._open: list[TakeBack] = []
        self._doubted: Latest[str, None] = Latest(MAX_DOUBTED)
        self._is_stopped = False

    @property
    def num_open(self) -> int:
        """Promised, or being copied."""
        return len(self._open)

    def stop(self) -> None:
        """Promise nothing any more."""
        self._is_stopped = True

    def promise(self, keys: Sequence[str], num_held: int) -> TakeBack | None:
        """What the arena has of a prompt's pages behind the first ``num_held``, which are in the pool; under a lease.
        None: nothing."""
        behind = keys[num_held:]
        if self._is_stopped or not behind or behind[-1] in self._doubted:
            return None
        peers = self._peers()
        match = peers.lookup(behind, self._arenas)
        lease = peers.lease(match, behind[: match.num_pages]) if match.num_pages else None
        if lease is None:
            return None
        promised = TakeBack(lease, behind[-1])
        self._open.append(promised)
        return promised

    def begin(self, promised: TakeBack, frames: Frames) -> None:
        """Copy it into ``frames`` of the pool."""
        promised.begin(lambda lease: self._peers().start_copy([(lease, frames)]))

    def poll(self) -> None:
        """At the end of a scheduler's step: let go what nobody has begun, collect what has ended. Never waits."""
        for each in self._open:
            each.let_go()
            each.look()
        self._close()

    def quiesce(self) -> None:
        """The pages of the arena, or of the pool, are about to mean something else: let go what was promised, and wait
        for the copies. Requests fail whose pages are being copied; those whose pages are in go on, as any other that
        the pool has pages of."""
        for each in self._open:
            each.let_go()
            each.settle()
            if each.state is State.IN:
                each.state = State.FAILED
        self._close()

    def _close(self) -> None:
        for each in self._open:
            if each.state is State.IN:
                self._counters.taken_back_pages += each.num_pages
            elif each.state is State.FAILED:
                self._counters.take_backs_failed += 1
                self._doubted.put(each.prompt, None)
        self._open = [each for each in self._open if each.is_open]
