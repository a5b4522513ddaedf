# SPDX-License-Identifier: Apache-2.0
"""Nodes of SGLang's tree on their way to the peers, where page numbers live on a GPU.

A rank has one of these, however many pools it has: the numbers of a node's full pages and of its window pages come to
the host together, and are published together.

Invariants
  1. A node is published after everything that was enqueued when it was sent: the forward that writes a stashed chunk
     may still run then. Nodes are published in the order in which they were sent.
  2. What SGLang freed before a node was sent is withdrawn before it is published, what it frees later is withdrawn
     afterwards (``readback_order``): SGLang holds a node that it offloads until it is told, but nobody holds one that
     is offered again.

States of a node: sent -> published -> told, where SGLang waits for it; or sent -> forgotten. Scheduler thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from banyan import faults
from banyan.sglang_plugin.pools.access import Publish, Window
from banyan.sglang_plugin.pools.readback_order import ReadbackOrder
from banyan.transport.cuda_ipc.copies import DeviceFrames
from banyan.transport.cuda_ipc.driver import CudaDriver
from banyan.transport.cuda_ipc.readback import ReadbackLane


@dataclass(frozen=True, slots=True)
class NodeKeys:
    """Of full pages, and of the window pages that a node still has; None where it has none."""

    full: list[str]
    window: Sequence[str] | None

    @property
    def num_pages(self) -> int:
        return len(self.full) + len(self.window or ())


@dataclass(frozen=True, slots=True)
class _Sent:
    keys: NodeKeys
    is_held: bool


class DeviceOffloads:
    """Sent when pages enter the tree, published when their numbers have come."""

    def __init__(self, driver: CudaDriver, order: ReadbackOrder, *, stream: int, num_pages: int) -> None:
        """``num_pages`` exist in all pools of the rank. ``stream`` carries numbers to the host."""
        self._order = order
        self._num_pages = num_pages
        # Of what SGLang holds no page is under way twice; as much again for what is offered again.
        self._lane: ReadbackLane[_Sent] = ReadbackLane(driver, stream=stream, num_pages=2 * num_pages)
        self._num_unheld = 0
        self._completed: deque[bool] = deque()
        self._publish: Publish | None = None

    def attach(self, publish: Publish) -> None:
        self._publish = publish

    def send(self, keys: NodeKeys, numbers: DeviceFrames, *, behind: Sequence[int]) -> None:
        """A node that SGLang holds until it is told: the numbers of its full pages, then of its window pages.

        Raises:
            DriverError: when the driver refuses; the node will not be published.
            ValueError: when there are not as many numbers as keys.
        """
        self._send(_Sent(keys, is_held=True), numbers, behind)

    def send_again(self, keys: NodeKeys, numbers: DeviceFrames, *, behind: Sequence[int]) -> None:
        """A node that nobody holds. Where too many are under way it is not offered.

        Raises: as ``send``.
        """
        if self._num_unheld + keys.num_pages > self._num_pages:
            return
        self._send(_Sent(keys, is_held=False), numbers, behind)
        self._num_unheld += keys.num_pages

    def _send(self, sent: _Sent, numbers: DeviceFrames, behind: Sequence[int]) -> None:
        if numbers.numel() != sent.keys.num_pages:
            raise ValueError(f"{numbers.numel()} page numbers for {sent.keys.num_pages} keys")
        self._lane.send(sent, numbers, behind=behind)
        self._order.sent(self)

    def take_next(self) -> bool:
        """Publish the oldest node; False when its numbers have not come."""
        taken = self._lane.take()
        if taken is None:
            return False
        sent, numbers = taken
        frames, num_full = np.frombuffer(numbers, dtype=np.int64), len(sent.keys.full)
        window = None if sent.keys.window is None else (sent.keys.window, frames[num_full:])
        is_published = self._publish_quietly(frames[:num_full], sent.keys.full, window)
        if sent.is_held:
            self._completed.append(is_published)
        else:
            self._num_unheld -= sent.keys.num_pages
        return True

    def _publish_quietly(self, frames: Any, keys: list[str], window: Window | None) -> bool:
        """A node has had its turn in the order, whatever becomes of it, and SGLang holds it until it is told."""
        assert self._publish is not None
        try:
            self._publish(frames, keys, window)
        except BaseException as error:  # noqa: BLE001 - a panic of native code is one
            faults.note("device_offloads.publish", error, stops=True)
            return False
        return True

    @property
    def num_completed(self) -> int:
        return len(self._completed)

    def pop_completed(self) -> bool:
        return self._completed.popleft()

    def give_up(self) -> None:
        """What is under way is not published; SGLang is told so."""
        num_held = sum(sent.is_held for sent in self._lane.tags())
        self._drop()
        self._completed.extend([False] * num_held)

    def forget(self) -> None:
        """SGLang has forgotten its offloads: they are neither published nor told."""
        self._drop()
        self._completed.clear()

    def _drop(self) -> None:
        self._lane.forget()
        self._order.forget(self)
        self._num_unheld = 0
