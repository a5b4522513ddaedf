# SPDX-License-Identifier: Apache-2.0
"""Bytes that mean nothing, lent to whoever wants to know what a path carries. They are no pages and take no room."""

from __future__ import annotations

PROBES_PER_S, MOST_PROBES_AT_ONCE = 10, 20
TOO_MANY = "too many probes"
"""Why a probe is refused that comes too soon behind others."""

_ZEROS = memoryview(bytes(1 << 20))


class ProbeBytes:
    """So many bytes, all of them in the first layer; and a lease on no page."""

    num_pages = 0

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def layer(self, layer: int) -> list[memoryview]:
        whole, rest = divmod(0 if layer else self._num_bytes, len(_ZEROS))
        return [_ZEROS] * whole + ([_ZEROS[:rest]] if rest else [])

    def release(self) -> None:
        pass
