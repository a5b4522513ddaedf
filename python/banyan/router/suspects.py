# SPDX-License-Identifier: Apache-2.0
"""Which of the requests that were lost together with their server may visit another one.

A request that brings a server down must not visit the next, and one that only was there should not fail for it. Nobody
can say which of them it was; so each needs a reason to be believed innocent.

Invariants
  1. Of those that were lost together the one that was sent last goes nowhere else; neither does one that was lost with
     a server before. So no request is lost with more than two servers, and one that was alone with more than one.
  2. Of the others one is on trial at a time, then two, then four: until its answer begins, or for ``TRIAL_S``.
  3. When one of them is lost again it is taken for the cause: who is left of its group is free, and so is who was lost
     beside it.
  4. A body that went nowhere else is remembered, and counts as lost before when it comes again: ``MAX_REMEMBERED`` of
     them, each for ``REMEMBERED_S`` or until it is answered.

A group: gathering (``TOGETHER_S``) -> the server is asked -> it is well, and nobody is suspect; or it is not, and each
is free, waits for its trial, or is held.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from banyan.latest import Latest

ServerT = TypeVar("ServerT")

TOGETHER_S = 0.1
"""The connections of a process that has ended break within that time of each other."""

TRIAL_S = 1.0
"""What a server dies of it dies of soon after it has begun with it."""

MAX_REMEMBERED = 4096
REMEMBERED_S = 600.0
MOST_LOSSES = 2
END_BYTES = 64 << 10


class Held(StrEnum):
    """Why a request goes to no other server, in the words of the metrics."""

    LAST = "last"
    """Its server was sent nothing after it."""
    AGAIN = "again"
    """It was lost together with a server before."""
    LATE = "late"
    """Too many are tried before it."""


WHY_HELD = {
    Held.LAST: "the server was lost with this request, the last that it was sent, and may have ended because of it: "
    "it is not tried on another one. Send it again if that was not so",
    Held.AGAIN: "two servers were lost with this request: no other one is sent it for some minutes",
    Held.LATE: "the server was lost with this request and others, which are tried one after the other, and its turn "
    "did not come in time (--queue-timeout-s)",
}


@dataclass(eq=False)
class Suspect:
    """A request of a client, as long as it is on its way. ``num_lost``: servers that were lost while it was there."""

    digest: bytes
    num_lost: int = 0
    sent_s: float = 0.0
    trial: _Trial | None = None


@dataclass(eq=False)
class _Trial:
    """One of a group is sent to another server. It is over once, however that comes."""

    turns: asyncio.Semaphore
    timer: asyncio.TimerHandle | None = None
    is_over: bool = False

    def over(self, num_next: int = 2) -> None:
        """So many others may be tried."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.is_over:
            self.is_over = True
            for _ in range(num_next):
                self.turns.release()


@dataclass(frozen=True, slots=True)
class _Loss:
    """One that was lost, as it was then: it may soon be on its way again."""

    suspect: Suspect
    num_before: int
    sent_s: float


@dataclass(eq=False)
class _Group:
    """Requests that were lost together."""

    losses: list[_Loss] = field(default_factory=list)
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    judged: asyncio.Task[bool] | None = None

    @property
    def has_cause(self) -> bool:
        return any(loss.num_before > 0 for loss in self.losses)

    @property
    def last(self) -> Suspect:
        return max(self.losses, key=lambda loss: loss.sent_s).suspect


def _digest(body: bytes, to: str) -> bytes:
    """Names a body and where it is to go. Of a large one its ends and its length do: hashing all of it would hold
    everybody up."""
    ends = body if len(body) <= 2 * END_BYTES else body[:END_BYTES] + body[-END_BYTES:]
    path = hashlib.blake2b(to.encode(errors="surrogatepass"), digest_size=16).digest()
    return hashlib.blake2b(ends, digest_size=16, key=path, salt=len(body).to_bytes(16, "little")).digest()


class Suspects(Generic[ServerT]):
    """``is_none_to_blame`` says whether no request is to be suspected of what befell a server."""

    def __init__(
        self, is_none_to_blame: Callable[[ServerT], Awaitable[bool]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_none_to_blame = is_none_to_blame
        self._clock = clock
        self._groups: dict[ServerT, _Group] = {}
        self._remembered: Latest[bytes, tuple[int, float]] = Latest(MAX_REMEMBERED)

    # ---- on its way --------------------------------------------------------------------------------------------

    def enters(self, body: bytes, to: str = "") -> Suspect:
        """A request has come, ``to`` a path."""
        self._forget_old()
        digest = _digest(body, to)
        num_lost, _ = self._remembered.get(digest, (0, 0.0))
        return Suspect(digest, num_lost)

    def is_barred(self, suspect: Suspect) -> bool:
        """Whether no server is to see it."""
        return suspect.num_lost >= MOST_LOSSES

    def sent(self, suspect: Suspect) -> None:
        """It is on its way to a server."""
        suspect.sent_s = self._clock()
        trial = suspect.trial
        if trial is not None and trial.timer is None:
            trial.timer = asyncio.get_running_loop().call_later(TRIAL_S, trial.over)

    def answered(self, suspect: Suspect) -> None:
        """Its answer has begun."""
        self.left(suspect)
        self._remembered.pop(suspect.digest, None)

    def left(self, suspect: Suspect) -> None:
        """It goes to no server any more."""
        if suspect.trial is not None:
            suspect.trial.over()

    # ---- lost --------------------------------------------------------------------------------------------------

    def lost(self, suspect: Suspect, servers: Sequence[ServerT]) -> list[_Group]:
        """It was lost at these servers: of a pair it was at both."""
        groups = []
        for server in servers:
            group = self._groups.get(server)
            if group is None:
                group = self._groups[server] = _Group()
                group.judged = asyncio.get_running_loop().create_task(self._judge(server, group))
            if all(loss.suspect is not suspect for loss in group.losses):
                group.losses.append(_Loss(suspect, suspect.num_lost, suspect.sent_s))
            groups.append(group)
        return groups

    async def may_go_on(self, suspect: Suspect, servers: Sequence[ServerT], patience_s: float) -> Held | None:
        """Whether one that was lost may be sent to another server, when this returns; else why not."""
        groups = self.lost(suspect, servers)
        # A request that is given up meanwhile leaves the others' question as it is.
        well = [await asyncio.shield(group.judged) for group in groups if group.judged is not None]
        dead = [group for group, is_well in zip(groups, well, strict=True) if not is_well]
        if not dead:
            return None
        group = dead[0]
        if any(loss.num_before > 0 for loss in group.losses if loss.suspect is suspect):
            if suspect.trial is not None:
                suspect.trial.over(num_next=MAX_REMEMBERED)
            return Held.AGAIN
        if group.has_cause:
            return None
        if group.last is suspect:
            return Held.LAST
        return await self._turn(suspect, group, patience_s)

    async def _turn(self, suspect: Suspect, group: _Group, patience_s: float) -> Held | None:
        try:
            async with asyncio.timeout(patience_s):
                await group.turns.acquire()
        except TimeoutError:
            return Held.LATE
        suspect.trial = _Trial(group.turns)
        return None

    async def _judge(self, server: ServerT, group: _Group) -> bool:
        """Whether nobody is to be suspected. Else all of the group have been lost once more."""
        try:
            await asyncio.sleep(TOGETHER_S)
        finally:
            # Whoever is lost there from now on is of another group.
            del self._groups[server]
        if await self._is_none_to_blame(server):
            return True
        for loss in group.losses:
            suspect = loss.suspect
            suspect.num_lost = max(suspect.num_lost, loss.num_before + 1)
            if loss.num_before > 0 or (suspect is group.last and not group.has_cause):
                self._remember(suspect)
        return False

    def _remember(self, suspect: Suspect) -> None:
        self._remembered.put(suspect.digest, (suspect.num_lost, self._clock() + REMEMBERED_S))

    def _forget_old(self) -> None:
        now_s = self._clock()
        while self._remembered:
            digest = next(iter(self._remembered))
            if self._remembered[digest][1] > now_s:
                return
            del self._remembered[digest]
