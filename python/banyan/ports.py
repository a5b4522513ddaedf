# SPDX-License-Identifier: Apache-2.0
"""The edges of the data path, as protocols. ``cache.py`` knows these and no implementation.

On a server they are the native objects of ``banyan._native``, or of ``banyan.transport.cuda_ipc`` where pools lie on
GPUs. Everything here is called on the scheduler thread; only a ``Copy`` is worked on by another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, runtime_checkable

from banyan import _native
from banyan.core import Fetch, Outcome, Refusal, Run

if TYPE_CHECKING:
    from banyan.planner import RequestFacts

Clock = Callable[[], int]
"""Monotonic time in nanoseconds. The simulator has its own."""

Frames = Any
"""Page numbers of a pool: a sized, C-contiguous buffer of int64 (a numpy array at the edge)."""


class Match(Protocol):
    """Where the leading pages of a key list were seen. A hint: only a lease makes it a promise."""

    num_pages: int
    runs: list[tuple[int, int]]


class Lease(Protocol):
    """The right to copy ``num_pages`` pages; their owners do not reuse the frames until it is released. A copy takes it
    over."""

    num_pages: int
    runs: list[tuple[int, int]]

    def release(self) -> None:
        """Give the right back. Safe to call twice."""


class Copy(Protocol):
    """A copy on its way, layer by layer in forward order. Holds its leases until it has ended.

    On the host a wait blocks the caller, and a copy has ended when ``finish`` returns. On a GPU waits are put into the
    streams that follow, and a copy ends later.
    """

    @property
    def bytes_fetched(self) -> int: ...
    @property
    def bytes_copied(self) -> int: ...
    @property
    def copy_s(self) -> float:
        """Seconds that moving took; known once the copy has ended."""

    @property
    def wait_s(self) -> float: ...
    @property
    def has_ended(self) -> bool:
        """Whether neither its sources nor its destination are touched any more."""

    def wait_layer(self, layer: int) -> float:
        """Wait until that layer is in place; seconds waited. Returns also when the copy failed: ``finish`` tells."""

    def finish(self) -> bool:
        """Wait until nothing writes the destination any more; True when every layer landed."""

    def ages_s(self) -> Sequence[float]:
        """Seconds ago: copying began; then for each layer that is in place, it landed. Empty before, and where layers
        have no time of their own on the host."""


class Peers(Protocol):
    """Where pages come from: the frame tables of the peers."""

    def version(self) -> int:
        """A number that changes whenever an earlier ``lookup`` could now answer differently."""

    def lookup(self, keys: Sequence[str], slots: Sequence[int] | None = None) -> Match:
        """The longest run of leading pages that the frame tables in ``slots`` hold together. Never blocks.

        Of equally long runs the first of ``slots`` supplies; without it all peers are asked, the nearest first.
        """

    def holders(self, keys: Sequence[str], slots: Sequence[int]) -> Sequence[int | None]:
        """For each page by itself the first of ``slots`` whose frame table holds it. Never blocks."""

    def read_access_logs(self, slots: Sequence[int]) -> Sequence[bytes]:
        """The pages that prompts of the ranks in ``slots`` asked for since the last call: for each prompt their
        numbers, little-endian int64, of which the lowest bit is set where a prompt begins. Advice: some may have been
        missed, and of one then maybe the rest is given."""

    def touch(self, match: Match) -> None:
        """Tell the owners that these pages are wanted; a lease does so by itself."""

    def lease(self, match: Match, keys: Sequence[str]) -> Lease | None:
        """Lease the pages ``keys``, with which a match begins: all of them, or None. Also None when the match is of
        other pages: whatever was remembered of it, a lease is for the pages that it names."""

    def start_copy(
        self, loads: Sequence[tuple[Lease, Frames]], arrivals: Sequence[tuple[StoreRead, Sequence[int], Frames]] = ()
    ) -> Copy:
        """Start to copy each lease's pages into the given frames of this rank's pool.

        ``arrivals``: pages, by position in a read under way, and their frames; each layer follows that of the read.
        What they are read into stays as it is until the copy has ended.
        """


OwnFrameTable = _native.FrameTable
"""This rank's own pages, as others see them. One writer: the scheduler thread."""


class ArenaFrameTable(Protocol):
    """The frame table of this rank's part of the host arena. As ``OwnFrameTable``; what was leased lately decides who
    stays. Frames that come back are ``bytes`` of little-endian int64."""

    def publish(self, frames: Frames, keys: Sequence[str]) -> int: ...

    def retire(self, frames: Frames) -> bytes: ...

    def drain(self) -> bytes: ...

    def take_touched(self, frames: Frames) -> bytes:
        """Those of ``frames`` that were leased since they were last asked about."""


class StoreFound(Protocol):
    """Leading pages that the store held at the time of a lookup. A hint."""

    @property
    def num_pages(self) -> int: ...

    def after(self, num_pages: int, /) -> Self:
        """What was found behind the first ``num_pages``; of fewer, nothing."""


class StoreRead(Protocol):
    """Pages on their way from the store into memory, layer by layer."""

    has_ended: bool
    is_late: bool
    """The device does not answer: all pages have failed, while frames are the store's until ``has_ended``."""
    bytes_read: int
    read_s: float

    def offsets(self, positions: list[int]) -> bytes:
        """Where in the memory of the read these of its pages go: int64 byte offsets."""

    def failed_pages(self) -> list[int]:
        """Block until the last layer is through; positions of the pages that failed."""

    def finish(self) -> list[tuple[int, str]]:
        """Block until nothing writes the memory any more; positions of the pages that failed, with the reason."""


class PageStore(Protocol):
    """The store as a rank uses it. Only ``sync``, ``invalidate``, ``clear`` and ``close`` wait for a device.

    ``engine`` says in one line what does the I/O.
    """

    engine: str

    version: int
    """Differs from the last answer when a lookup may answer differently."""

    def register(self, memory: object) -> None:
        """Announce memory that pages will move in and out of, so that the first read need not prepare it."""

    def lookup(self, keys: list[str], /) -> StoreFound:
        """The longest run of leading pages; of a store that has to be asked, as far as it has answered before."""

    def read(
        self, found: StoreFound, num_pages: int, memory: object, offsets: Frames, *, layers_per_step: int
    ) -> StoreRead:
        """Start to read the first ``num_pages``: page ``i`` to byte ``offsets[i]`` of ``memory``, step by step."""

    def put(self, keys: Sequence[str], parent: str | None, memory: object, offsets: Frames) -> list[str]:
        """Queue a chain of pages that follows ``parent``; for each whether it was "queued", or why not."""

    def completed(self) -> list[tuple[str, str]]:
        """Queued pages that the store has let go since the last call: key, and whether it was "stored", "present" (it
        turned out that the store had it) or "failed"."""

    def sync(self, within_s: float | None = None) -> int:
        """Write out what is queued and wait for it; how many pages failed.

        Raises:
            OSError: when the store gets nothing done for a while, or all of it takes longer than ``within_s``. Then
                what has not started has failed; what has is named by ``completed`` when it is over.
        """

    def pause_writes(self) -> None:
        """Start no write until ``open_writes``."""

    def open_writes(self) -> None:
        """Write whenever nobody reads."""

    def clear(self) -> int:
        """Remove every page that this writer has stored, whatever stands behind it, and fail what is queued; how many
        pages were removed. Nobody can read one of them when this returns.

        Raises:
            OSError: when the drive has not taken it in time. This writer finds none of them all the same.
        """

    def invalidate(self, namespace: bytes) -> None:
        """Go on in another namespace; nothing of the old one is found again."""

    def stats(self) -> dict[str, int]:
        """Counters and gauges, for ``/server_info``."""

    def close(self) -> None: ...


Found = TypeVar("Found", bound=StoreFound, covariant=True)


@runtime_checkable
class Asked(Protocol[Found]):
    """Who has to be asked what it holds: a store, or other nodes. No call waits."""

    def ask(self, keys: Sequence[str]) -> int | None:
        """Ask who has the leading pages of ``keys``; the number of the question, None where nobody listens."""

    def answers(self) -> Sequence[tuple[int, Found | None]]:
        """The questions that are over since the last call."""


class FetchPlanner(Protocol):
    """Decides what is worth reading, and is told what becomes of every fetch."""

    def num_to_read(self, request: RequestFacts, num_missing: int, found: Run, /) -> int:
        """Of the ``num_missing`` last pages of the prompt the store, or another node, has ``found``, from the first on:
        how many to read."""

    def became(self, request: str, outcome: Outcome) -> None:
        """What became of a request's fetch so far."""

    def refused(self, request: str, why: Refusal) -> None:
        """It computes what it was to fetch."""

    def started(self, fetches: Sequence[Fetch]) -> None:
        """The forward that SGLang has just put together follows these, which move together; or none."""

    def moved(self, fetches: Sequence[Fetch], copy_s: float) -> None:
        """The copy of fetches that landed has ended, after so long."""

    def was_read(self, came: Run, read_s: float) -> None:
        """These came from a source in ``read_s``, before any fetch wanted them: no copy tells."""


class Elsewhere(Protocol):
    """Who else may read for a request of this rank, which reads nothing itself then."""

    def is_sent_for(self, request: str) -> bool:
        """Whether somebody is reading for it now."""

    def send_for(self, request: str) -> bool:
        """Something of the request's prompt is missing: as ``is_sent_for``, and does now what a router has said: sends
        another node, or reads itself. Where it has, nothing more is read."""


class LayerWatch(Protocol):
    """Who hears of the layers that forwards complete. Scheduler thread."""

    def begin(self) -> None:
        """A forward begins."""

    def completed(self, num_layers: int) -> None:
        """It has completed its first ``num_layers``."""
