# SPDX-License-Identifier: Apache-2.0
"""NIXL as what reads another node's memory: in a process of its own, for what it may do to the one that it is in.

UCX ends the process that it is in when a connection fails at the wrong moment, takes what another node says of itself
as it is, and does not call a transfer back that has begun. A process can be ended at any time, and when it is dead
nothing is written any more.
"""

from __future__ import annotations

from importlib.util import find_spec

WAY_OUT = "pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1"


def is_installed() -> bool:
    return find_spec("nixl") is not None
