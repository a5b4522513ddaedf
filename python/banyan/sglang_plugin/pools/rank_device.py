# SPDX-License-Identifier: Apache-2.0
"""What all pools of a rank share of its GPU: the driver, streams, what is on its way to the peers.

Copies into each pool run on two streams of their own, so that a layer waits for the copies of its own pool alone; all
of them in one partition of the GPU's processors. Numbers of pages come to the host, and pages go down to the arena, on
streams that the pools share: CUDA maps streams onto few queues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from banyan.config import Config
from banyan.refusals.start import device_memory_refusal
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.device_offloads import DeviceOffloads
from banyan.sglang_plugin.pools.device_start import open_driver, open_ends
from banyan.sglang_plugin.pools.readback_order import ReadbackOrder
from banyan.telemetry import one_thread
from banyan.transport.cuda_ipc.copy_stream import CopyStreams, open_copy_streams
from banyan.transport.cuda_ipc.driver import DriverError
from banyan.transport.cuda_ipc.host_pieces import KeptPieces, Pinned
from banyan.transport.cuda_ipc.peers import CudaPeers

logger = logging.getLogger("banyan")

STREAMS_PER_POOL = 2
"""For what is leased, and for what follows reads of the store."""


class RankDevice:
    """One rank's. Scheduler thread only."""

    def __init__(self, config: Config, pools: Sequence[Any]) -> None:
        """``pools`` are all that the rank has. Refuses where there is no driver."""
        self.driver = open_driver()
        self.readback_stream, self.backup_stream = self.driver.create_stream(), self.driver.create_stream()
        try:
            self.backup_ends = open_ends(self.driver)
        except DriverError as error:
            # The first memory of the host that the device is to know.
            runtime.refuse(device_memory_refusal(error))
        self.order = ReadbackOrder()
        self.offloads = DeviceOffloads(
            self.driver,
            self.order,
            stream=self.readback_stream,
            num_pages=sum(pool.banyan_geometry.num_pages for pool in pools),
        )
        self.opener = one_thread("banyan-open")
        self.pinned = Pinned()
        self.registrations = KeptPieces(self.driver, self.pinned)
        self.readers: list[CudaPeers] = []
        """Of all pools, while they are in use."""
        self._num_sms = config.copy_sms
        self._num_pools = len(pools)
        self._opened: CopyStreams | None = None
        self._untaken: list[int] = []

    def take_copy_streams(self, try_stream: Callable[[int], None]) -> CopyStreams:
        """The streams of one pool's copies. ``try_stream`` does on one what these copies do.

        Raises:
            DriverError: when streams cannot be made or used.
        """
        if self._opened is None:
            self._opened = open_copy_streams(
                self.driver,
                num_sms=self._num_sms,
                num_streams=STREAMS_PER_POOL * self._num_pools,
                try_stream=try_stream,
            )
            self._untaken = list(self._opened.streams)
            logger.info("banyan: copies between GPUs on %s", self._opened.note)
        else:
            for stream in self._untaken[:STREAMS_PER_POOL]:
                try_stream(stream)
        taken, self._untaken = self._untaken[:STREAMS_PER_POOL], self._untaken[STREAMS_PER_POOL:]
        return replace(self._opened, streams=taken)

    def settle(self) -> None:
        """Take note of what the device has done: publish and withdraw what has come, give back leases of what was
        copied. Never waits.

        Whoever waits for pages of any pool calls it: they may be held by copies of this rank, and peers that wait for
        pages of this rank wait for its copies.
        """
        self.order.take()
        for reader in self.readers:
            reader.poll()
