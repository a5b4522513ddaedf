# SPDX-License-Identifier: Apache-2.0
"""The quarantine of an allocator: what is freed while a peer reads it is not handed out.

A page, or the slot of a state, is always in exactly one place: handed out, free (upstream's lists), or in quarantine.
The set kept here equals the frame table's quarantine; it exists because upstream's leak check wants numbers. A copy
ends by itself: an allocation that runs short waits for it. What the frame table could not withdraw stays in quarantine
until it can: a page that peers may find is never handed out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from banyan import faults
from banyan.pacing.lockstep import READER_PATIENCE_S

logger = logging.getLogger("banyan")
T = TypeVar("T")

NO_PAGES: NDArray[np.int64] = np.empty(0, dtype=np.int64)

OLD_S = 0.5
"""From then on what a reader holds is not counted on where others can be evicted in its place."""

CIRCLE_S = 2.0
"""From then on readers that do not let go are taken to wait for this rank: longer than most forwards that a copy may be
queued behind."""

POLL_S = 0.0002


def frame_array(page_ids: torch.Tensor) -> NDArray[np.int64]:
    """Page numbers in the form the native core takes."""
    return page_ids.to(torch.int64).contiguous().numpy()


class OwnPages(Protocol):
    """What an allocator asks before it hands a freed page out. Frames come back as bytes of int64."""

    def retire(self, frames: Any) -> bytes:
        """Withdraw pages; those that nobody reads."""

    def drain(self) -> bytes:
        """Those that have been let go since."""


class Quarantine:
    """What an allocator with a quarantine has besides upstream's. ``device``, ``page_size`` and ``free`` are
    upstream's."""

    device: Any
    page_size: int
    free: Any

    agreed: Callable[[bool], bool] = staticmethod(lambda granted: granted)
    """Whether every shard of the rank got what it asked for, given whether this one did."""

    is_whole_rank = True
    """Whether no other shard has pages of the same tokens."""

    _tree: Any = None
    """SGLang's, once it is known."""
    _tree_name = "num_tokens"
    """What the tree calls what is in this pool, where it is to evict."""

    _cache: OwnPages | None = None  # set by the linker; upstream's constructor already calls clear()
    _quarantine: dict[int, float]
    """Page -> since when, in seconds of ``time.monotonic``."""
    _not_withdrawn = NO_PAGES
    """Of the pages in quarantine, those that the frame table failed to withdraw."""
    wait_us = 0
    """How long allocations have waited for pages that were free but not handed out yet."""

    let_peers_go: Callable[[], int] = staticmethod(lambda: 0)
    """Gives up what this rank was promised and has not begun to copy; how many fetches. Readers may be waiting for the
    pages of peers that it holds, as it waits for them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # First: upstream's constructor asks what is free.
        self._quarantine = {}
        super().__init__(*args, **kwargs)

    def attach(self, cache: OwnPages) -> None:
        """From now on freed pages are withdrawn from ``cache`` before reuse."""
        self._cache = cache

    def evict_from(self, tree: Any, name: str) -> None:
        """SGLang's tree, which has what is in this pool, and what it calls that where it is to evict."""
        self._tree, self._tree_name = tree, name

    @property
    def _num_held(self) -> int:
        """Pages that are free but not handed out yet."""
        return len(self._quarantine)

    def _put_back(self, page_ids: torch.Tensor) -> None:
        """Nobody reads these any more: into upstream's list."""
        raise NotImplementedError

    def poll(self) -> None:
        """Take what readers have let go of. Called on every scheduling step, also while nothing is short: what is kept
        here without a reader would count as held, and others would be evicted in its place."""
        if self._num_held:
            self._take_drained()

    def wait_for_readers(self) -> None:
        """Wait until no page is in quarantine.

        Raises:
            RuntimeError: when a reader does not let go.
        """
        self._wait_until(lambda: not self._num_held, READER_PATIENCE_S)
        if self._num_held:
            raise RuntimeError(f"peers have held {self._num_held} page(s) for over {READER_PATIENCE_S:g} s")

    def _withdraw(self, frames: NDArray[np.int64], page_ids: torch.Tensor) -> torch.Tensor:
        """Withdraw pages, given as numbers and as SGLang has them; the ones to free now. Others go to quarantine."""
        reusable = np.frombuffer(self._retire(frames), dtype=np.int64)
        if len(reusable) == len(frames):
            return page_ids
        held = set(frames.tolist()).difference(reusable.tolist())
        self._quarantine.update(dict.fromkeys(held, time.monotonic()))
        return self._page_ids(reusable)

    def _retire(self, frames: NDArray[np.int64]) -> bytes:
        assert self._cache is not None
        try:
            return self._cache.retire(frames)
        except BaseException as error:  # noqa: BLE001 - whatever it is, SGLang is about to hand these pages out
            faults.note("allocator.retire", error, stops=True)
            self._not_withdrawn = np.concatenate((self._not_withdrawn, frames))
            return b""

    def _drain(self) -> bytes:
        assert self._cache is not None
        again, self._not_withdrawn = self._not_withdrawn, NO_PAGES
        withdrawn = self._retire(again) if len(again) else b""
        try:
            return withdrawn + self._cache.drain()
        except BaseException as error:  # noqa: BLE001 - pages in quarantine stay there
            faults.note("allocator.drain", error, stops=True)
            return withdrawn

    def _page_ids(self, frames: NDArray[np.int64]) -> torch.Tensor:
        """Page numbers as SGLang keeps them."""
        return torch.tensor(frames, dtype=torch.int64, device=self.device)

    def _quarantined_ids(self) -> torch.Tensor:
        return self._page_ids(np.array(sorted(self._quarantine), dtype=np.int64))

    def _when_readers_let_go(self, allocate: Callable[[], T | None], patience_s: float) -> T | None:
        """Allocate; when the pool is short, take pages out of quarantine as their readers finish, and try again."""
        slots = allocate()
        if slots is not None or not self._num_held:
            return slots

        def retry() -> bool:
            nonlocal slots
            slots = allocate()
            return slots is not None

        began_s = time.monotonic()
        old_s = OLD_S - (began_s - min(self._quarantine.values(), default=began_s))
        due: list[Callable[[], object]] = []
        # A reader that has not let go by then may never, or may be waiting for this rank.
        for until_s, do in ((old_s, self._evict_for_held), (CIRCLE_S, self._give_up), (patience_s, None)):
            self._wait_until(retry, min(patience_s, until_s) - (time.monotonic() - began_s))
            if do is None or slots is not None or not self._num_held or patience_s <= until_s:
                break
            due.append(do)
            # What is only on its way to the host, behind this rank's own forward, no reader holds.
            while self._quarantine and due and slots is None:
                due.pop(0)()
                retry()
            if slots is not None:
                break
        self.wait_us += round((time.monotonic() - began_s) * 1e6)
        if slots is None and self._num_held and patience_s >= READER_PATIENCE_S:
            logger.error(
                "banyan: the pool is short and peers have held %d page(s) for over %g s: is a rank stopped?",
                self._num_held,
                patience_s,
            )
        return slots

    def _if_all_shards_got(self, slots: torch.Tensor | None) -> torch.Tensor | None:
        """What was allocated, or None: the quarantines of a rank's shards differ, what they do about it must not."""
        if self.agreed(slots is not None):
            return slots
        if slots is not None:
            self.free(slots)
        return None

    def _evict_for_held(self) -> None:
        """Evict others in the place of what readers hold, where that is possible."""
        # The shards of a rank must evict alike, and only this one knows what its readers hold.
        tree = self._tree if self.is_whole_rank else None
        if tree is not None and tree.supports_prefix_sharing():
            # What is on its way down comes by itself, and what went in its place would go down behind it.
            now_s = time.monotonic()
            num_old = sum(now_s - since_s >= OLD_S for since_s in self._quarantine.values())
            tree.evict_for_alloc(EvictParams(**{self._tree_name: num_old * self.page_size}))

    def _give_up(self) -> None:
        num_fetches = self.let_peers_go()
        if num_fetches:
            logger.warning(
                "banyan: the pool is short and peers have held what is free for %g s, perhaps because they wait for "
                "this rank: %d fetch(es) are given up, and their requests computed",
                CIRCLE_S,
                num_fetches,
            )

    def _wait_until(self, enough: Callable[[], bool], patience_s: float) -> None:
        """Free pages as they leave quarantine until ``enough``, or nothing is left in it, or patience ends."""
        deadline = time.monotonic() + patience_s
        while self._num_held:
            if self._take_drained():
                if enough():
                    return
            elif time.monotonic() < deadline:
                time.sleep(POLL_S)
            else:
                return

    def _take_drained(self) -> bool:
        drained = np.frombuffer(self._drain(), dtype=np.int64)
        # A frame table that was emptied while a reader stayed gives back what SGLang has not freed: that is its own.
        freed = [page for page in dict.fromkeys(drained.tolist()) if page in self._quarantine]
        if not freed:
            return False
        frames = np.array(freed, dtype=np.int64)
        if not self._put_back_or_hold(frames, lambda: self._page_ids(frames)):
            return False
        for page in freed:
            del self._quarantine[page]
        return True

    def _put_back_or_hold(self, frames: NDArray[np.int64], free: Callable[[], torch.Tensor]) -> bool:
        """Put the numbers that ``free`` makes of ``frames`` back; False where there is no memory for them: all stay in
        quarantine then, and are withdrawn once more. A page in no list at all would be lost."""
        try:
            self._put_back(free())
        except BaseException as error:  # noqa: BLE001 - whatever it is, SGLang has freed these pages
            faults.note("allocator.put_back", error, stops=True)
            self._quarantine = dict.fromkeys(frames.tolist(), time.monotonic()) | self._quarantine
            self._not_withdrawn = np.union1d(self._not_withdrawn, frames)
            return False
        return True
