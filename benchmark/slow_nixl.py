# SPDX-License-Identifier: Apache-2.0
"""UCX's ports of a network of one's own, at a bounded rate: what ``slow_path`` is for a page server's ports. Its bytes
go from process to process, so the kernel counts and bounds them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from benchmark.own_network import SLOW_PORTS, SlowPorts
from benchmark.slow_path import Alarm

LOOK_S = 0.01
ENV = (
    ("UCX_TLS", "tcp"),
    ("UCX_MODULES", "^ib"),
    ("UCX_TCP_PORT_RANGE", f"{SLOW_PORTS.start}-{SLOW_PORTS.stop - 1}"),
)
"""Of servers whose NIXL uses these ports."""


class SlowNixl:
    """As ``slow_path.SlowPath``; ``rate`` in bytes a second, of all together."""

    def __init__(self, *, rate: float) -> None:
        self._ports = SlowPorts()
        self._rate = rate
        self._alarm: Alarm | None = None
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def num_bytes(self) -> int:
        """That have passed, headers included."""
        return self._ports.num_bytes()

    def at(self, num_bytes: float, action: Callable[[], None]) -> Alarm:
        """Call ``action`` when so many more bytes have passed; instead of what was to be called before."""
        self._alarm = Alarm(num_bytes, action)
        return self._alarm

    def __enter__(self) -> SlowNixl:
        self._ports.limit(self._rate * 8 / 1e6)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def _watch(self) -> None:
        seen = self.num_bytes
        while not self._has_ended.wait(LOOK_S):
            now = self.num_bytes
            alarm = self._alarm
            if alarm is not None:
                alarm.came(now - seen)
            seen = now
