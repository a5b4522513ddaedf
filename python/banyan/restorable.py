# SPDX-License-Identifier: Apache-2.0
"""Kinds of pages, and what of each a prefix needs to be restored at a length.

Of full pages it needs all. Of window pages, the KV of layers that see the last tokens only, it needs the last ones, and
of states, which layers of other kinds keep of all tokens before them, the last: a state is a window of one page, which
lies in one slot. Each kind has frame tables of its own.

A layer with a window needs no page that lies behind it, and SGLang frees it. So n pages can be restored only where all
of their full pages are held and the last of their window pages too: the lengths that can be are sparse.

Invariants
  1. A length is restorable when the last ``num_pages`` window pages before it, or all where it is shorter, are held on
     the frame tables or are on their way from the store.
  2. Window pages are asked for, leased and copied from the end of a prefix to its beginning. So what is missing of them
     is their beginning, as what is missing of full pages is their end.

``PrefixCache`` leases full pages and window pages together, or neither. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from banyan.ports import Copy, Frames, OwnFrameTable
from banyan.supply import Nobody, Supply

Holds = Callable[[Sequence[str]], int]
"""How many of these pages, from the first on, are held."""


FIRST_ASKED = 64
"""Pages at the end of a prompt."""


def window_of(keys: Sequence[str], num_pages: int) -> list[str]:
    """The last ``num_pages`` of a prefix, from its end to its beginning."""
    return list(keys[max(0, len(keys) - num_pages) :])[::-1]


def longest_restorable(keys: Sequence[str], most: int, num_pages: int, holds: Holds) -> int:
    """The most leading pages of ``keys``, no more than ``most``, before which ``num_pages`` window pages are held.

    Every length between a missing page and ``num_pages`` behind it needs that page, so it is skipped.
    """
    length = min(most, len(keys))
    while length > 0:
        window = list(keys[max(0, length - num_pages) : length])[::-1]
        if holds(window) == len(window):
            break
        window.reverse()
        num_leading = holds(window) if len(window) > 1 else 0
        length = min(length - len(window) + num_leading, length - 1)
    return length


class KindPages:
    """The pages of one kind that one rank has, and those that it can have. Of a prefix all of them are needed."""

    def __init__(self, frame_table: OwnFrameTable, supply: Supply) -> None:
        self.frame_table = frame_table
        self.supply = supply

    def retire(self, frames: Frames) -> bytes:
        """Take back frames that SGLang frees; those that may be reused at once. The others come out of ``drain``."""
        return self.frame_table.retire(frames)

    def drain(self) -> bytes:
        """Frames whose readers have gone."""
        return self.frame_table.drain()

    def move_to(self, join: Callable[[], tuple[OwnFrameTable, Supply]]) -> None:
        """Go on with the frame table and the supply of a new namespace, made by ``join``. The old ones are let go
        first: a rank has one frame table and one reader bit. Where ``join`` fails, frames are still retired and handed
        out, and nobody supplies anything."""
        self.frame_table.close()
        self.supply = Supply(Nobody(), (), None)
        self.frame_table, self.supply = join()


class WindowPages(KindPages):
    """Of a prefix only the last ``num_pages`` are needed.

    Args:
        reached: for each layer of the model, how many layers of full pages and of window pages there are up to it,
            itself included.
        num_draft_layers: how many lie behind the model's in a full page, and in a window page.
    """

    def __init__(
        self,
        frame_table: OwnFrameTable,
        supply: Supply,
        *,
        num_pages: int,
        reached: Sequence[tuple[int, int]],
        num_draft_layers: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(frame_table, supply)
        self._num_pages = num_pages
        *before, (full, windows) = reached
        # A draft runs behind the last one.
        self._reached = [*before, (full + num_draft_layers[0], windows + num_draft_layers[1])]

    def longest(self, keys: Sequence[str], most: int) -> int:
        """The longest restorable length of up to ``most`` pages; 0 where there is none."""
        return next(self.lengths(keys, most), 0)

    def lengths(self, keys: Sequence[str], most: int) -> Iterator[int]:
        """All restorable lengths of up to ``most`` pages, the longest first."""
        keys = keys[:most]
        held, coming = self._held(keys), self.supply.on_their_way
        # From which page on all before the length are held, and whether the page before that is.
        first_held, is_held = len(keys), next(held, False)
        for length in range(len(keys), 0, -1):
            if first_held > length:
                first_held, is_held = length, next(held, False)
            start = max(0, length - self._num_pages)
            while is_held and first_held > start:
                first_held, is_held = first_held - 1, next(held, False)
            # Nothing of most prompts is on its way, and this is asked for each of their pages.
            if first_held > start and keys[first_held - 1] not in coming:
                continue
            missing = keys[start:first_held][::-1]
            if sum(run.num_pages for run in self.supply.arriving(missing)) == len(missing):
                yield length

    def _held(self, keys: Sequence[str]) -> Iterator[bool]:
        """Whether each page is, from the last on. Mostly the longest length is restorable, so few are asked about at
        first; where none is, there are thousands."""
        end, num_asked = len(keys), FIRST_ASKED
        while end:
            start = max(0, end - num_asked)
            yield from (holder is not None for holder in reversed(self.supply.holders(keys[start:end])))
            end, num_asked = start, 2 * num_asked

    def joined(self, full: Copy, windows: Copy) -> Copy:
        """Both copies of a batch as one, whose layers are the model's."""
        return _JoinedCopy((full, windows), self._reached)


def reached_in_turn(places: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Where a layer has pages of one kind: for each layer of the model, how many of full pages and of the second kind
    there are up to it, itself included. ``places``: whether its pages are of the second kind (1) or full ones (0), and
    its number among those."""
    counts, reached = [0, 0], []
    for part, place in places:
        counts[part] = place + 1
        reached.append((counts[0], counts[1]))
    return tuple(reached)


class _JoinedCopy:
    """Two copies that end together. Who has waited for a layer of the model has all before it, of either copy: a
    forward that is replayed as one graph waits for the last layer alone."""

    def __init__(self, parts: tuple[Copy, Copy], reached: Sequence[tuple[int, int]]) -> None:
        self._parts = parts
        self._reached = reached

    def wait_layer(self, layer: int) -> float:
        counts = zip(self._parts, self._reached[layer], strict=True)
        return sum(part.wait_layer(count - 1) for part, count in counts if count)

    def finish(self) -> bool:
        return all([part.finish() for part in self._parts])

    def ages_s(self) -> list[float]:
        ages = [part.ages_s() for part in self._parts]
        told = [max((part[0] for part in ages if part), default=0.0)] if all(ages) else []
        for counts in self._reached if told else ():
            if any(count >= len(part) for part, count in zip(ages, counts, strict=True)):
                break
            told.append(min(part[count] for part, count in zip(ages, counts, strict=True)))
        return told

    @property
    def has_ended(self) -> bool:
        return all(part.has_ended for part in self._parts)

    @property
    def bytes_fetched(self) -> int:
        return sum(part.bytes_fetched for part in self._parts)

    @property
    def bytes_copied(self) -> int:
        return sum(part.bytes_copied for part in self._parts)

    @property
    def copy_s(self) -> float:
        return max(part.copy_s for part in self._parts)

    @property
    def wait_s(self) -> float:
        return sum(part.wait_s for part in self._parts)
