# SPDX-License-Identifier: Apache-2.0
"""What a kubelet does with a container's three probes, by their fields; ``Watched`` is pure, ``watch`` asks."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

STARTUP, READINESS, LIVENESS = "startupProbe", "readinessProbe", "livenessProbe"
DEFAULTS = {"initialDelaySeconds": 0, "periodSeconds": 10, "timeoutSeconds": 1, "successThreshold": 1}
FAILURES = 3
"""``failureThreshold`` where it is not said."""


@dataclass
class Watched:
    """One container, as its probes have seen it. Readiness and liveness are asked when startup has passed.

    States: starting -> started, ready or not -> to be restarted (``must_restart``), for good.
    """

    probes: Mapping[str, Mapping[str, Any]]
    is_started: bool = field(init=False)
    is_ready: bool = False
    must_restart: str = ""
    _in_a_row: dict[str, int] = field(default_factory=dict)
    """By probe, how many have passed in a row, or have failed (negative)."""

    def __post_init__(self) -> None:
        self.is_started = STARTUP not in self.probes

    def is_due(self, name: str) -> bool:
        if self.must_restart or name not in self.probes:
            return False
        return (name == STARTUP) != self.is_started

    def took(self, name: str, has_passed: bool) -> None:
        """A probe was answered, or was not in time."""
        probe = self.probes[name]
        before = self._in_a_row.get(name, 0)
        count = max(before, 0) + 1 if has_passed else min(before, 0) - 1
        self._in_a_row[name] = count
        passes = count >= probe.get("successThreshold", DEFAULTS["successThreshold"])
        fails = -count >= probe.get("failureThreshold", FAILURES)
        if name == STARTUP and passes:
            self.is_started = True
        elif name == READINESS and (passes or fails):
            self.is_ready = passes
        elif fails:
            self.must_restart = f"{name} has failed {-count} times"


def ask(address: str, port: int, path: str, timeout_s: float) -> bool:
    """``httpGet``: whether the answer came in time and is none of an error."""
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    began_s = time.monotonic()
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return 200 <= status < 400 and time.monotonic() - began_s <= timeout_s


def watch(watched: Watched, address: str, port: int, until: threading.Event, tell: Callable[[str], None]) -> None:
    """Ask until the container must be restarted or ``until`` is set; each probe on a thread of its own."""
    for name in watched.probes:
        threading.Thread(target=_watch_one, args=(watched, name, address, port, until, tell), daemon=True).start()


def _watch_one(
    watched: Watched, name: str, address: str, port: int, until: threading.Event, tell: Callable[[str], None]
) -> None:
    probe = {**DEFAULTS, **watched.probes[name]}
    until.wait(probe["initialDelaySeconds"])
    while not until.is_set() and not watched.must_restart:
        if watched.is_due(name):
            has_passed = ask(address, port, probe["httpGet"]["path"], probe["timeoutSeconds"])
            if until.is_set():
                return
            was = (watched.is_started, watched.is_ready, watched.must_restart)
            watched.took(name, has_passed)
            now = (watched.is_started, watched.is_ready, watched.must_restart)
            if now != was:
                tell(f"{name}: started {now[0]}, ready {now[1]} {now[2]}")
        until.wait(probe["periodSeconds"])
