# SPDX-License-Identifier: Apache-2.0
"""One line of ``banyan doctor``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``advice`` is what to do when it is not well; ``hint`` is what would be better still, or
    what to mind, where it is."""

    what: str
    is_ok: bool
    detail: str
    advice: str = ""
    hint: str = ""

    @classmethod
    def refused(cls, what: str, line: str) -> Finding:
        """Of a line that names the way out behind its last colon that a space follows."""
        reason, _, way_out = line.rpartition(": ")
        return cls(what, False, reason or line, way_out if reason else "")

    def __str__(self) -> str:
        mark = "BAD " if not self.is_ok else "note" if self.hint else "ok  "
        more = self.hint if self.is_ok else self.advice
        line = f"{mark} {self.what}: {self.detail}"
        return f"{line}\n      -> {more}" if more else line
