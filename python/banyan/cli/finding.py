# SPDX-License-Identifier: Apache-2.0
"""One line of ``banyan doctor``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``advice`` is what to do when it is not well."""

    what: str
    is_ok: bool
    detail: str
    advice: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        line = f"{'ok  ' if self.is_ok else 'BAD '} {self.what}: {self.detail}"
        return line if self.is_ok or not self.advice else f"{line}\n      -> {self.advice}"
