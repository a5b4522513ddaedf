# SPDX-License-Identifier: Apache-2.0
"""The router's clock for what is compared with reports of loads.

It goes on when somebody sets the machine's clock back: reports would else be older than the last one for as long. It is
ahead of the monotonic one, as the last report of an idle rank may be older than the machine is up.
"""

from __future__ import annotations

import time

_AHEAD_S = time.time() - time.monotonic()


def now_s() -> float:
    """Seconds; as the epoch's were when the process began."""
    return _AHEAD_S + time.monotonic()
