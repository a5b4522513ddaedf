# SPDX-License-Identifier: Apache-2.0
"""What ``--banyan-store`` names: a scheme and folders, or folders alone, which are files on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FILE = "file"


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A backend and its folders, in the order in which pages are striped over them."""

    scheme: str
    paths: tuple[str, ...]

    @classmethod
    def parse(cls, parts: Sequence[str]) -> StoreLocation:
        """Of ``("/a", "/b")`` or ``("scheme:///a", "/b")``: the list that commas separate. A scheme counts for all.

        Raises:
            ValueError: for a host, a scheme behind the first part, or nothing.
        """
        if not parts:
            raise ValueError("no folder is named")
        scheme, separator, first = parts[0].partition("://")
        if not separator:
            scheme, first = FILE, parts[0]
        paths = (first, *parts[1:])
        for path in paths:
            if "://" in path:
                raise ValueError(f"{path}: one scheme for all folders, before the first of them")
            if separator and not path.startswith("/"):
                raise ValueError(f"{scheme}://{path}: folders are absolute here, as in {scheme}:///folder")
        return cls(scheme, paths)

    def __str__(self) -> str:
        return f"{self.scheme}://{','.join(self.paths)}"
