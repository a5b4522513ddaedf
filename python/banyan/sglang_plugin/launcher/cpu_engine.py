# SPDX-License-Identifier: Apache-2.0
"""Where a distribution enters itself that makes SGLang's CPU engine fit to serve; Banyan knows no more of it.

SGLang's own attention on a CPU computes a cached prefix's queries again, and some kinds of model do not start there.
``banyan-cpu-engine`` mends that, for any server. Where it is installed, Banyan's servers on CPUs run with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("banyan")

MISSING = (
    "no CPU engine: SGLang's own attention computes a cached prefix again, and models with states, drafts or adapters "
    "do not start: install banyan-cpu-engine (in a checkout: make setup), and allow it where SGLANG_PLUGINS is set"
)

_start: Callable[[Any], None] | None = None


def provide(start: Callable[[Any], None]) -> None:
    """``start`` has a server on a CPU run with the engine; it is given SGLang's arguments, not resolved yet."""
    global _start
    _start = start


def start_with(server_args: Any) -> None:
    """Have this server, on a CPU, run with the engine that is installed; say so where none is."""
    if _start is None:
        logger.warning("banyan: %s", MISSING)
    else:
        _start(server_args)
