# SPDX-License-Identifier: Apache-2.0
"""A rank's dealings with the page servers of other nodes: asks who has a prompt, borrows, pulls, gives back.

Invariants
  1. The scheduler's thread calls the public methods, and none of them waits. What it wants goes through a queue to one
     thread, which owns the sockets; what that learns comes back through another queue.
  2. Every pull's read ends: when its bytes are there, when it is refused, after `PATIENCE_S` without a remote lease
     (and what its checksums take), after `TURN_S` with one and no thread, or after the carrier's own time-out, or soon
     after ``give_up``. When the thread ends by a fault, those end that no worker has begun, questions are over, and
     no node listens.
  3. No more than `MAX_PULLS` of one node move bytes at once, none more than the caller has frames for. Nobody waits for
     one node because of another.
  4. A node that was lost is not waited for again by pulls that it had lent for before, and one whose pulls fail again
     and again by nobody for a while (``Carriers.rests``).

A pull: wanted -> lent -> carried -> given back; or refused, or unanswered. Closed with ``close``.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from banyan import _native
from banyan.core import Address
from banyan.features.nodes.carriers import Carriers
from banyan.features.nodes.exported_arena import PartFrames
from banyan.features.nodes.nixl_pulls import ReadByNixl
from banyan.features.nodes.node_connections import NodeConnections, NodeMessage
from banyan.features.nodes.pull import Ended, NodeFound, Pull
from banyan.features.nodes.questions import PATIENCE_S, Best, Questions
from banyan.features.nodes.remote_leases import TERM_S
from banyan.features.nodes.tcp import TcpCarrier
from banyan.features.nodes.wire import (
    MAX_PAGES,
    Answer,
    Ask,
    Foreign,
    Read,
    Reading,
    Refused,
    RemoteLease,
    Return,
    ToBorrower,
    pack_keys,
    read_by_borrower,
)
from banyan.layout import BlockGeometry
from banyan.telemetry import start_thread
from banyan.telemetry.workers import Workers
from banyan.transport.sealed.secret import Keys

logger = logging.getLogger("banyan")

MAX_PULLS = 2
TURN_S = 2.0
"""A pull waits no longer for those before it from its node: a forward may be waiting for it."""

MAX_QUESTIONS = 256
TICK_MS = 20

SUMMED_BYTES_PER_S = 1 << 30
"""A lender computes checksums of what it lends before it answers, at least so fast."""


@dataclass(slots=True)
class _Wanted:
    """A pull that waits for its remote lease."""

    node: int
    pull: Pull
    deadline_s: float


@dataclass(frozen=True, slots=True)
class _Lent:
    """A pull that has its remote lease, and waits for a thread."""

    node: int
    pull: Pull
    token: bytes
    deadline_s: float


class Borrower:
    """One rank's. ``nodes``: the page servers of its shard."""

    def __init__(
        self,
        nodes: Sequence[Address],
        keys: Keys,
        *,
        namespace: bytes,
        block: BlockGeometry,
        carrier: TcpCarrier,
        by_nixl: Sequence[ReadByNixl] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``by_nixl``: for each node, what reads there where it can; ``carrier`` brings the rest."""
        self._nodes = list(nodes)
        self._places = {str(node): place for place, node in enumerate(nodes)}
        self._namespace = namespace
        self._block = block
        self.carriers = Carriers(nodes, carrier, by_nixl, clock)
        self._clock = clock
        self._asking = Questions(len(nodes), clock, self.carriers.rests)
        self._remote_prefetches: set[int] = set()  # questions that are
        self._unwilling: set[int] = set()
        self._foreign: set[int] = set()
        self._numbers = itertools.count(1)
        self._asked: dict[int, Sequence[str]] = {}
        self._answers: deque[Best] = deque()
        self._wanted: dict[int, _Wanted] = {}
        self._num_pulls = [0] * len(self._nodes)  # wanted, lent and carried
        # Pulls of which no byte has come: until then the thread may lose them.
        self._lock = threading.Lock()
        self._waiting: set[Pull] = set()
        self._is_off = False
        self._num_given_up = 0
        self._num_losses = [0] * len(self._nodes)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lent: deque[_Lent] = deque()
        self._workers = [
            Workers(MAX_PULLS, name="banyan-pull", feature="a pull from another node") for _ in self._nodes
        ]
        self._has_ended = False
        self.num_lost = 0
        self.num_foreign = 0
        self._connections = NodeConnections(nodes, keys, connected=self._asking.connected)
        self._thread = start_thread(
            self._run, name="banyan-borrow", feature="borrowing pages of other nodes", ended=self._off
        )

    # ---- the scheduler's thread --------------------------------------------------------------------------------

    @property
    def num_listening(self) -> int:
        """Nodes that answer."""
        return len(self._asking.listening)

    def ask(self, keys: Sequence[str]) -> int | None:
        """Ask all nodes that listen for ``keys``; the number under which `answers` says what came of it, if any
        listens."""
        return self._put(Ask, keys, range(len(self._nodes)))

    def ask_at(self, nodes: Sequence[str], keys: Sequence[str]) -> int | None:
        """As ``ask``, of those nodes alone, by their addresses."""
        return self._put(Ask, keys, [self._places[node] for node in nodes if node in self._places])

    def knows(self, node: str) -> bool:
        """Whether a node of that address is one of this rank's."""
        return node in self._places

    def _put(self, kind: type[Ask | Read], keys: Sequence[str], among: Sequence[int]) -> int | None:
        listening = self._asking.listening
        if not any(place in listening for place in among) or len(self._asked) >= MAX_QUESTIONS:
            return None
        keys = keys[:MAX_PAGES]
        number = next(self._numbers)
        self._asked[number] = keys
        self._tell(partial(self._ask, kind, number, among, pack_keys(keys)))
        return number

    def send(self, node: str, keys: Sequence[str]) -> int | None:
        """Have the node of that address bring ``keys`` from its store into its arena; the number under which `answers`
        says how much of it is there, None when that node does not listen or is none of this rank's."""
        place = self._places.get(node)
        return None if place is None or len(keys) > MAX_PAGES else self._put(Read, keys, [place])

    def answers(self) -> list[tuple[int, NodeFound | None]]:
        """Questions that are over since the last call: what the node with the most pages has, and others, or None.
        Never waits."""
        over: list[tuple[int, NodeFound | None]] = []
        while self._answers:
            best = self._answers.popleft()
            # It may have come when its thread had ended, and was said to be over.
            keys = self._asked.pop(best.number, ())
            found = None
            if keys and best.node >= 0:
                others = tuple(self._found(node, keys[:num_pages]) for node, num_pages in best.others)
                found = self._found(best.node, keys[: best.num_pages], others)
            over.append((best.number, found))
        if self._is_off:
            over += [(number, None) for number in self._asked]
            self._asked.clear()
        return over

    def _found(self, node: int, keys: Sequence[str], others: tuple[NodeFound, ...] = ()) -> NodeFound:
        return NodeFound(str(self._nodes[node]), node, keys, others)

    def read(
        self,
        found: NodeFound,
        num_pages: int,
        memory: _native.SharedBytes,
        offsets: array[int],
    ) -> _native.Read:
        """Start to pull the first ``num_pages``: page ``i`` to byte ``offsets[i]`` of ``memory``."""
        layer_bytes = self._block.layer_bytes
        feed = _native.Feed(memory, offsets, self._block.block_bytes, len(layer_bytes))
        read = feed.read()
        pull = Pull(self._namespace, found.keys[:num_pages], PartFrames(memory, offsets, layer_bytes), feed)
        with self._lock:
            is_off = self._is_off
            self._waiting.add(pull)
        if is_off:
            self._let_go(pull)
        self._tell(partial(self._want, found.node, pull))
        return read

    def give_up(self) -> None:
        """Nobody wants any more what is being pulled: its reads end at once, or soon."""
        with self._lock:
            self._num_given_up += 1
            waiting = list(self._waiting)
        for pull in waiting:
            self._let_go(pull)

    def close(self) -> None:
        """End every pull and let the nodes go. Safe to call twice."""
        if self._has_ended:
            return
        self._has_ended = True
        self._tell(lambda: None)
        self._thread.join()
        self._connections.close()
        self.carriers.close()

    def _tell(self, command: Callable[[], None]) -> None:
        if not self._is_off:
            self._commands.put(command)
        self._connections.wake()

    # ---- the thread that owns the sockets ----------------------------------------------------------------------

    def _run(self) -> None:
        while not self._has_ended:
            self._hear()
            self._obey()
            for late in self._asking.expire():
                self._over(late)
            self._give_up_waiting(self._clock())
            self._probe()
        self._end()

    def _hear(self) -> None:
        """All that has come, before anything is taken to be late: this thread may have stood still."""
        wait_ms = TICK_MS
        for _ in range(MAX_QUESTIONS):
            messages = self._connections.wait(wait_ms)
            for message in messages:
                self._take(message)
            if not messages:
                return
            wait_ms = 0

    def _obey(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _end(self) -> None:
        self._end_workers()
        self._obey()
        self._give_up_waiting(math.inf)
        self._connections.hang_up()

    def _end_workers(self) -> None:
        for workers in self._workers:
            # No pull takes longer.
            workers.close(TERM_S)

    def _off(self) -> None:
        """The thread has ended by a fault: nobody is to wait for what it would have done."""
        with self._lock:
            self._is_off = True
            waiting = list(self._waiting)
        for pull in waiting:
            self._let_go(pull)
        for node in range(len(self._nodes)):
            self._asking.silent(node)
        self._end_workers()
        self._connections.hang_up()

    def _let_go(self, pull: Pull) -> bool:
        """It ends without a byte, unless it has begun; whether it does."""
        is_let_go = self._begins(pull)
        if is_let_go:
            pull.feed.end()
        return is_let_go

    def _begins(self, pull: Pull) -> bool:
        """It waits no more; whether it did."""
        with self._lock:
            was_waiting = pull in self._waiting
            self._waiting.discard(pull)
        return was_waiting

    def _ask(self, kind: type[Ask | Read], number: int, among: Sequence[int], packed: bytes) -> None:
        nodes = self._asking.begin(number, among)
        if not nodes:
            self._answers.append(Best(number, -1, 0))
        elif kind is Read:
            self._remote_prefetches.add(number)
        for node in nodes:
            if not self._connections.send(node, kind(number, self._namespace, packed)):
                self._over(self._asking.missed(number, node))

    def _turned_down(self, best: Best | None, node: int, reason: str) -> None:
        """A question was refused; of a remote prefetch that is said, once for each node."""
        if best is not None and best.number in self._remote_prefetches and node not in self._unwilling:
            self._unwilling.add(node)
            logger.warning("banyan: the node at %s does not read for this one: %s", self._nodes[node], reason)
        self._over(best)

    def _probe(self) -> None:
        for node, number in self._asking.to_probe():
            self._connections.send(node, Ask(number, self._namespace, b""))

    def _over(self, best: Best | None) -> None:
        if best is not None:
            self._remote_prefetches.discard(best.number)
            self._answers.append(best)

    def _want(self, node: int, pull: Pull) -> None:
        number = next(self._numbers)
        summing_s = len(pull.keys) * self._block.block_bytes / SUMMED_BYTES_PER_S
        self._wanted[number] = _Wanted(node, pull, self._clock() + PATIENCE_S + summing_s)
        self._num_pulls[node] += 1
        if not self._connections.send(node, self.carriers.borrow(node, number, self._namespace, pack_keys(pull.keys))):
            self._refused(number)

    def _refused(self, number: int) -> None:
        wanted = self._wanted.pop(number, None)
        if wanted is not None:
            self._num_pulls[wanted.node] -= 1
            self._asking.refused(wanted.node)
            self._let_go(wanted.pull)

    def _give_up_waiting(self, now_s: float) -> None:
        while self._lent and self._lent[0].deadline_s <= now_s:
            lent = self._lent.popleft()
            if self._let_go(lent.pull):
                # Others could have it meanwhile: its turn may come in half a minute.
                self._connections.send(lent.node, Return(lent.token))
        for number in [number for number, wanted in self._wanted.items() if wanted.deadline_s <= now_s]:
            self._asking.silent(self._wanted[number].node)
            self._refused(number)

    def _take(self, heard: NodeMessage) -> None:
        node = heard.node
        try:
            message = read_by_borrower(heard.payload)
        except Foreign as error:
            self.num_foreign += 1
            if node not in self._foreign:
                self._foreign.add(node)
                logger.warning("banyan: the node at %s sent what no page server sends: %s", self._nodes[node], error)
        else:
            self._heed(node, message, heard.host)

    def _heed(self, node: int, message: ToBorrower, host: str) -> None:
        match message:
            case Answer(number, num_pages):
                self._over(self._asking.answered(number, node, num_pages, self._num_pulls[node]))
            case Reading(number) if number in self._remote_prefetches:
                # Nothing else that is asked takes a node so long.
                self._asking.reads_on(number, node)
            case Refused(number, reason):
                self._turned_down(self._asking.answered(number, node, 0), node, reason)
                if self._is_wanted_of(node, number):
                    self._refused(number)
            case RemoteLease(number):
                if not self._is_wanted_of(node, number):
                    self._connections.send(node, Return(message.token))
                else:
                    self._begin_pull(node, self._wanted.pop(number).pull, message, host)

    def _begin_pull(self, node: int, pull: Pull, remote_lease: RemoteLease, host: str) -> None:
        # It waits until a thread has it: there may be none.
        since = self._num_given_up, self._num_losses[node]
        try:
            self._workers[node].submit(partial(self._carry, node, pull, remote_lease, host, since))
        except RuntimeError as error:
            logger.warning("banyan: pages from the node at %s: %s; they are computed", self._nodes[node], error)
            self._let_go(pull)
            self._carried(node, remote_lease, Ended.GIVEN_UP)
            return
        self._lent.append(_Lent(node, pull, remote_lease.token, self._clock() + TURN_S))

    def _is_wanted_of(self, node: int, number: int) -> bool:
        wanted = self._wanted.get(number)
        return wanted is not None and wanted.node == node

    # ---- a worker's thread -------------------------------------------------------------------------------------

    def _carry(self, node: int, pull: Pull, remote_lease: RemoteLease, host: str, since: tuple[int, int]) -> None:
        num_given_up, num_losses = since
        ended = Ended.GIVEN_UP
        try:
            if self._num_losses[node] != num_losses:
                self._let_go(pull)
            elif self._begins(pull):
                wanted = partial(self._is_wanted_since, num_given_up)
                carrier = self.carriers.of(node, remote_lease)
                ended = pull.carry(remote_lease, host, carrier, wanted)
                self.carriers.ended(node, carrier, ended)
            if ended is Ended.LOST:
                with self._lock:
                    self._num_losses[node] += 1
        finally:
            # After a fault, too: the node would keep the pages for a term.
            self._tell(partial(self._carried, node, remote_lease, ended))

    def _is_wanted_since(self, num_given_up: int) -> bool:
        return self._num_given_up == num_given_up

    def _carried(self, node: int, remote_lease: RemoteLease, ended: Ended) -> None:
        self._num_pulls[node] -= 1
        self._connections.send(node, Return(remote_lease.token))
        if ended in (Ended.LOST, Ended.DAMAGED):
            self.num_lost += 1
            logger.warning("banyan: pages from the node at %s: %s; they are computed", self._nodes[node], ended.value)
        if ended is Ended.LOST:
            self._asking.silent(node)
        elif ended is Ended.WHOLE:
            self._asking.brought(node)
