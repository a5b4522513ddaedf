# SPDX-License-Identifier: Apache-2.0
"""The servers, what they are divided into for placing, and what is in flight at each.

A *target* is what a request is sent to: one rank of a stock server, named in the request, or a whole server whose
ranks share their pages and whose own dispatcher knows better which one. Targets are the policies' ranks.

Invariants
  1. Targets keep their numbers for ever. A server that comes back with another number of ranks gets new ones.
  2. A request counts as in flight at exactly one target from ``take`` until ``release``.
  3. Requests in flight at a server that has fallen silent are told so. A stream of which more still comes goes on: the
     server is slow, and gets nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from banyan import _native
from banyan.features.pairs import Role
from banyan.layout import cacheable_tokens
from banyan.router.asked_prompt import Asked
from banyan.router.blocks import Holder, RankBlocks, held_by, held_in_memory, leading_blocks
from banyan.router.clock import now_s
from banyan.router.description import UNKNOWN, Description, together
from banyan.router.events import EventFeed
from banyan.router.health import Health, State
from banyan.routing import Choice, Dispatcher, LoadReport, Prompt
from banyan.routing.reads import ReadQueue
from banyan.routing.sent import PIECE_TOKENS, SentPieces


@dataclass(eq=False)
class Server:
    """One server. ``in_flight``: what to call when it is given up, for each request there. ``loads``: by rank.
    ``role``: what the router was told that it does. ``reads``: what it waits for from its store, as it was last asked.
    ``num_given_tokens``: what it was given to read from there, for requests that are under way; ``num_read_tokens``:
    for those that have ended since it was last asked."""

    url: str
    health: Health
    role: Role = Role.ALONE
    description: Description = UNKNOWN
    is_draining: bool = False
    targets: list[Target] = field(default_factory=list)
    feeds: list[EventFeed] = field(default_factory=list)
    loads: dict[int, LoadReport] = field(default_factory=dict)
    in_flight: dict[int, Callable[[str, float], None]] = field(default_factory=dict)
    reads: ReadQueue = field(default_factory=ReadQueue)
    num_given_tokens: int = 0
    num_read_tokens: int = 0

    @property
    def takes_requests(self) -> bool:
        return self.health.state is State.UP and self.description is not UNKNOWN and not self.is_draining


@dataclass(eq=False)
class Target:
    """One row of the policies' table. ``rank`` is None for a server that places requests itself."""

    number: int
    server: Server
    rank: int | None
    num_in_flight: int = 0
    sent: SentPieces = field(default_factory=SentPieces)


@dataclass(eq=False)
class Place:
    """The right to send one request to a target, until it is released. ``beside``: at a decode server, the place of the
    same request at a prefill server, and ``seen_tokens``, leading tokens that prefill servers were sent before."""

    target: Target
    choice: Choice
    num_tokens: int
    cached_tokens: int
    at_s: float
    beside: Place | None = None
    seen_tokens: int = 0
    is_released: bool = False


class Fleet:
    """Who can be sent to, and who is chosen."""

    def __init__(
        self,
        servers: Sequence[Server],
        dispatcher: Dispatcher,
        *,
        max_in_flight: int,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self.servers = list(servers)
        self.targets: list[Target] = []
        self._dispatcher = dispatcher
        self._max_in_flight = max_in_flight
        self._clock = clock

    # ---- what servers say --------------------------------------------------------------------------------------

    def described(self, server: Server, description: Description) -> bool:
        """A server has said what it is; whether that is a new start of it, whose caches are empty."""
        old = server.description
        if old == description:
            return False
        server.description = description
        for feed in server.feeds:
            feed.forget()
        for target in server.targets:
            target.sent.forget()
        if (old.num_ranks, old.places_itself) != (description.num_ranks, description.places_itself):
            ranks: list[int | None] = [None] if description.places_itself else list(range(description.num_ranks))
            server.targets = [self._target(server, rank) for rank in ranks]
        server.feeds = [EventFeed() for _ in description.sources]
        server.loads.clear()
        return True

    def _target(self, server: Server, rank: int | None) -> Target:
        """Its row: the one that it had before it was started otherwise, for rows are never taken away."""
        for target in self.targets:
            if target.server is server and target.rank == rank:
                return target
        target = Target(len(self.targets), server, rank)
        self.targets.append(target)
        # A rank that has not computed anything yet may not tell its load: it is a row of the table all the same.
        self._dispatcher.reported(target.number, LoadReport())
        return target

    def reported(self, server: Server, reports: dict[int, LoadReport], reads: ReadQueue) -> None:
        """The load of a server's ranks; {} where it does not tell: what was sent there counts until it has ended."""
        server.reads, server.num_read_tokens = reads, 0
        for target in server.targets:
            self._dispatcher.waits_for_reads(target.number, reads.num_tokens)
        # Passed on together: of a server that is one target, the second rank's load would be no newer than the first's.
        for rank, report in reports.items():
            self._keep(server, rank, report)
        self._pass_on(server)

    def told(self, server: Server, rank: int, report: LoadReport) -> None:
        """A rank's load, as it has published it."""
        self._keep(server, rank, report)
        self._pass_on(server)

    def _keep(self, server: Server, rank: int, report: LoadReport) -> None:
        """Take note of a load, asked for or published; the one that was taken last counts. Of a rank that it has not
        said to have, nothing is kept."""
        last = server.loads.get(rank)
        if not 0 <= rank < server.description.num_ranks or (last is not None and not _is_news(report, last)):
            return
        if last is not None and not server.description.places_itself:
            # A stock rank reports when a forward has ended, and receives requests when it begins the next.
            report = msgspec.structs.replace(report, received_s=last.taken_s)
        server.loads[rank] = report
        if report.capacity_tokens and not server.description.keeps_more:
            server.targets[rank].sent.has_room_for(report.capacity_tokens)

    def _pass_on(self, server: Server) -> None:
        """What is no newer than the last does not count there."""
        for target in server.targets:
            load = together(server.loads) if target.rank is None else server.loads.get(target.rank, LoadReport())
            self._dispatcher.reported(target.number, load)

    def gave_up(self, server: Server, why: str, silent_s: float = 0.0) -> None:
        """The server is silent: tell the requests that wait for it, and have got nothing for ``silent_s``."""
        for tell in list(server.in_flight.values()):
            tell(why, silent_s)

    def forget_sent(self) -> None:
        """The servers have emptied their caches."""
        for target in self.targets:
            target.sent.forget()

    @property
    def has_events(self) -> bool:
        """Whether any server that takes requests tells what it holds."""
        return any(server.takes_requests and server.feeds for server in self.servers)

    def tells_nothing(self, server: Server) -> bool:
        """Whether events should tell what a target holds, none has come, and it was sent more than a page."""
        return any(
            not _has_told(target) and len(target.sent) * PIECE_TOKENS > self._block_tokens(target) > 0
            for target in server.targets
        )

    # ---- who is chosen -----------------------------------------------------------------------------------------

    def active(self, avoid: Collection[str], held_at: str | None = None) -> list[int]:
        """Targets with room at servers that take requests; those at ``avoid`` only when there is no other server. Those
        at ``held_at`` alone, if that is one of these servers: any other would answer that it does not know of it."""
        willing = [server for server in self.servers if server.takes_requests]
        if any(server.url == held_at for server in self.servers):
            willing = [server for server in willing if server.url == held_at]
        fresh = [server for server in willing if server.url not in avoid]
        return [
            target.number
            for server in fresh or willing
            for target in server.targets
            if target.num_in_flight < self._max_in_flight
        ]

    def take(self, asked: Asked, avoid: Collection[str] = ()) -> Place | None:
        """Choose a target and count the request there; None when none has room."""
        active = self.active(avoid, asked.held_at)
        if not active:
            return None
        cached = self.cached_tokens(asked)
        num_tokens = asked.num_tokens
        prompt = Prompt(num_tokens, cached_tokens=cached, session=asked.request.session, tokens=self._tokens_of(asked))
        now_s = self._clock()
        choice = self._dispatcher.place(prompt, active, now_s)
        target = self.targets[choice.rank]
        target.num_in_flight += 1
        target.sent.sent(asked.pieces)
        return Place(target, choice, num_tokens, cached[choice.rank], now_s)

    def opened(self, session: str, place: Place) -> None:
        """A server has given a session its name."""
        self._dispatcher.opened(session, place.target.number)

    def release(self, place: Place) -> None:
        """The request has ended, however that was. Twice is fine."""
        if place.is_released:
            return
        place.is_released = True
        place.target.num_in_flight -= 1
        self._dispatcher.ended(place.target.number, place.num_tokens, place.at_s)

    # ---- what targets hold -------------------------------------------------------------------------------------

    def cached_tokens(self, asked: Asked) -> list[int]:
        """Leading tokens of the prompt at each target: as its events tell, else as far as it was sent before."""
        return [self._cached_at(target, asked) for target in self.targets]

    def _cached_at(self, target: Target, asked: Asked) -> int:
        if not self._is_told(target, asked):
            return min(target.sent.leading_tokens(asked.pieces), asked.num_tokens)
        return self._held_tokens(target, asked, held_by(_ranks_of(target), self._same_store(target.server)))

    @property
    def block_sizes(self) -> set[int]:
        """Tokens of the pages that events name."""
        return {self._block_tokens(target) for target in self.targets} - {0}

    def known_tokens(self, place: Place, asked: Asked) -> int:
        """Leading tokens that the target of ``place`` holds for certain: none where it does not tell."""
        return place.cached_tokens if self._is_told(place.target, asked) else 0

    def tokens_in_memory(self, place: Place, asked: Asked) -> int:
        """Of the ``known_tokens``, those in front of the first that has to be read from a store."""
        if not self.known_tokens(place, asked):
            return 0
        return self._held_tokens(place.target, asked, held_in_memory(_ranks_of(place.target)))

    def seen_tokens(self, asked: Asked) -> int:
        """Leading tokens of the prompt that any target was sent before."""
        return max((target.sent.leading_tokens(asked.pieces) for target in self.targets), default=0)

    def _is_told(self, target: Target, asked: Asked) -> bool:
        """Whether its events tell what it holds of this prompt. Announced events may never come: until one has, what
        it was sent is all that is known."""
        is_named = asked.token_ids is not None and asked.request.is_salted_only and self._block_tokens(target) > 0
        return is_named and _has_told(target)

    @staticmethod
    def _block_tokens(target: Target) -> int:
        description = target.server.description
        return description.block_tokens if description.sources else 0

    def _tokens_of(self, asked: Asked) -> _native.PromptTokens | None:
        """The prompt's whole blocks, for what targets are about to hold; None where events would not name them."""
        block_tokens = min(
            (self._block_tokens(target) for target in self.targets if self._is_told(target, asked)), default=0
        )
        if not block_tokens or asked.token_ids is None:
            return None
        num_tokens = cacheable_tokens(len(asked.token_ids), block_tokens)
        return _native.PromptTokens(asked.prior, asked.token_ids[:num_tokens], block_tokens)

    def _held_tokens(self, target: Target, asked: Asked, holder: Holder) -> int:
        """Leading tokens of a prompt whose pages the target's events name."""
        block_tokens = self._block_tokens(target)
        return leading_blocks(asked.names(block_tokens), holder) * block_tokens

    def _same_store(self, server: Server) -> list[RankBlocks]:
        """What other servers tell of the store that is this one's too: to none of them is it nearer."""
        store = server.description.store
        return [
            feed.blocks
            for other in self.servers
            if store and other is not server and other.description.store == store
            for feed in other.feeds
        ]


def _feeds_of(target: Target) -> list[EventFeed]:
    return [feed for rank, feed in enumerate(target.server.feeds) if target.rank is None or target.rank == rank]


def _ranks_of(target: Target) -> list[RankBlocks]:
    return [feed.blocks for feed in _feeds_of(target)]


def _has_told(target: Target) -> bool:
    return any(feed.next_seq is not None for feed in _feeds_of(target))


def _is_news(report: LoadReport, last: LoadReport) -> bool:
    """Whether it is a later one, and not the same asked for again, whose time may differ by some milliseconds."""
    return report.taken_s > last.taken_s and (report.stamp_s is None or report.stamp_s != last.stamp_s)
