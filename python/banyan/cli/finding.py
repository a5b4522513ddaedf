# SPDX-License-Identifier: Apache-2.0
"""One line of ``banyan doctor``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``advice`` is what to do when it is not well; ``hint`` is what would be better still, or
    what to mind, where it is."""

    what: str
    is_ok: bool
    detail: str
    advice: str = ""
    hint: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        mark, more = ("note", self.hint) if self.is_ok and self.hint else ("ok  ", "")
        if not self.is_ok:
            mark, more = "BAD ", self.advice
        line = f"{mark} {self.what}: {self.detail}"
        return f"{line}\n      -> {more}" if more else line
