# SPDX-License-Identifier: Apache-2.0
"""The directory protocol in plain Python: what `banyan._native` does, but for one thread.

There is no memory to share here and there are no bytes to move.

Invariants
* A frame is idle, published (`ModelFrameTable.published`) or quarantined; never two of them.
* A quarantined frame is returned only when no lease names it.
* A key is published on at most one frame of a frame table: the first one.
* A refused call (`ValueError`) changes nothing.

Transitions of a frame, as in the native ledger:
idle --publish--> published --retire, unpinned--> idle (returned);
published --retire or reset, pinned--> quarantined --drain, unpinned--> idle (returned);
published --reset, unpinned--> idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class ModelRankTable:
    num_slots: int
    frame_tables: dict[int, ModelFrameTable] = field(default_factory=dict)


@dataclass(frozen=True)
class Sighting:
    """A published page as a lookup found it."""

    frame_table: ModelFrameTable
    frame: int
    generation: int


class ModelFrameTable:
    """A rank's frames; attached to its rank table until `close`."""

    def __init__(self, rank_table: ModelRankTable, slot: int, num_frames: int) -> None:
        if slot in rank_table.frame_tables:
            raise ValueError(f"slot {slot} is in use")
        self.rank_table = rank_table
        self.slot = slot
        self.num_frames = num_frames
        self.published: dict[int, str] = {}
        self.quarantine: list[int] = []
        self.generations: Counter[int] = Counter()
        self.pins: Counter[int] = Counter()
        self.version = 0
        rank_table.frame_tables[slot] = self

    def __hash__(self) -> int:
        return id(self)

    @property
    def num_published(self) -> int:
        return len(self.published)

    @property
    def num_quarantined(self) -> int:
        return len(self.quarantine)

    def frame_of(self, key: str) -> int | None:
        return next((frame for frame, other in self.published.items() if other == key), None)

    def publish(self, frames: Sequence[int], keys: Sequence[str]) -> int:
        self._check_publishable(frames, keys)
        num_new = 0
        for frame, key in zip(frames, keys, strict=True):
            if frame in self.published or self.frame_of(key) is not None:
                continue
            self.published[frame] = key
            self.generations[frame] += 1
            num_new += 1
        self.version += num_new > 0
        return num_new

    def retire(self, frames: Sequence[int]) -> list[int]:
        self._check_range(frames)
        if len(set(frames)) != len(frames):
            raise ValueError("a frame is named twice")
        self._withdraw([frame for frame in frames if frame in self.published])
        return [frame for frame in frames if frame not in self.quarantine]

    def drain(self) -> list[int]:
        free = [frame for frame in self.quarantine if not self.pins[frame]]
        self.quarantine = [frame for frame in self.quarantine if self.pins[frame]]
        return free

    def reset(self) -> None:
        self._withdraw(list(self.published))

    def close(self) -> None:
        if self.rank_table.frame_tables.get(self.slot) is self:
            self.reset()
            del self.rank_table.frame_tables[self.slot]

    def _withdraw(self, frames: list[int]) -> None:
        for frame in frames:
            del self.published[frame]
            self.generations[frame] += 1
            if self.pins[frame]:
                self.quarantine.append(frame)
        self.version += len(frames) > 0

    def _check_publishable(self, frames: Sequence[int], keys: Sequence[str]) -> None:
        if len(frames) != len(keys):
            raise ValueError(f"{len(frames)} frames but {len(keys)} keys")
        self._check_range(frames)
        named: dict[int, str] = {}
        for frame, key in zip(frames, keys, strict=True):
            if frame in self.quarantine:
                raise ValueError(f"frame {frame} is in quarantine")
            if self.published.get(frame, key) != key or named.setdefault(frame, key) != key:
                raise ValueError(f"frame {frame} is already published under another key")

    def _check_range(self, frames: Sequence[int]) -> None:
        for frame in frames:
            if not 0 <= frame < self.num_frames:
                raise ValueError(f"frame {frame} is outside the frame table of {self.num_frames} frames")


@dataclass(frozen=True)
class ModelMatch:
    pages: tuple[Sighting, ...]

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def runs(self) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for page in self.pages:
            slot, length = runs.pop() if runs and runs[-1][0] == page.frame_table.slot else (page.frame_table.slot, 0)
            runs.append((slot, length + 1))
        return runs


class ModelLease:
    def __init__(self, pages: tuple[Sighting, ...]) -> None:
        self.pages = pages
        self._held = True
        for page in pages:
            page.frame_table.pins[page.frame] += 1

    def release(self) -> None:
        if self._held:
            self._held = False
            for page in self.pages:
                page.frame_table.pins[page.frame] -= 1


class ModelPeers:
    def __init__(self, rank_table: ModelRankTable, slot: int | None) -> None:
        self.rank_table = rank_table
        self.slot = slot

    def lookup(self, keys: Sequence[str]) -> ModelMatch:
        pages: list[Sighting] = []
        while len(pages) < len(keys):
            rest = keys[len(pages) :]
            runs = [self._run(frame_table, rest) for frame_table in self._candidates()]
            longest = max(runs, key=len, default=[])
            if not longest:
                break
            pages += longest
        return ModelMatch(tuple(pages))

    def prefix_lens(self, keys: Sequence[str]) -> list[int]:
        frame_tables = self.rank_table.frame_tables
        return [
            len(self._run(frame_tables[slot], keys)) if slot in frame_tables else 0
            for slot in range(self.rank_table.num_slots)
        ]

    def lease(self, match: ModelMatch, keys: Sequence[str]) -> ModelLease | None:
        num_pages = len(keys)
        if num_pages > match.num_pages:
            raise ValueError(f"{num_pages} pages wanted of a match of {match.num_pages}")
        pages = match.pages[:num_pages]
        for page in pages:
            attached = self.rank_table.frame_tables.get(page.frame_table.slot) is page.frame_table
            if not attached or page.frame_table.generations[page.frame] != page.generation:
                return None
        ends = zip([*pages[:1], *pages[-1:]], [*keys[:1], *keys[-1:]], strict=True)
        if any(page.frame_table.frame_of(key) != page.frame for page, key in ends):
            return None
        return ModelLease(pages)

    def _candidates(self) -> list[ModelFrameTable]:
        """The other ranks, nearest slot above the own one first: `max` takes the first of equals."""
        num_slots = self.rank_table.num_slots
        first = 0 if self.slot is None else self.slot + 1
        order = [(first + step) % num_slots for step in range(num_slots)]
        return [
            self.rank_table.frame_tables[slot]
            for slot in order
            if slot != self.slot and slot in self.rank_table.frame_tables
        ]

    @staticmethod
    def _run(frame_table: ModelFrameTable, keys: Sequence[str]) -> list[Sighting]:
        run: list[Sighting] = []
        for key in keys:
            frame = frame_table.frame_of(key)
            if frame is None:
                break
            run.append(Sighting(frame_table, frame, frame_table.generations[frame]))
        return run
