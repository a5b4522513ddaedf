# SPDX-License-Identifier: Apache-2.0
"""Which loader reads a file: by name, or by what its first line looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from banyan_lab.replay import azure, coding_agent, messages, mooncake
from banyan_lab.replay.lines import json_lines, text_lines
from banyan_lab.replay.trace import Trace, TraceError

LOADERS: Mapping[str, Callable[[Path], Trace]] = MappingProxyType(
    {"mooncake": mooncake.load, "coding_agent": coding_agent.load, "messages": messages.load, "azure": azure.load}
)


def load(path: Path, format_name: str | None = None) -> Trace:
    """Read a trace; without a name, in the format that its first line shows.

    Raises:
        TraceError: when the file is in none of the formats.
    """
    return LOADERS[format_name or detect(path)](path)


def detect(path: Path) -> str:
    """Name of the format.

    Raises:
        TraceError: when the first line is of none.
    """
    first = next(text_lines(path), "")
    if first.startswith("TIMESTAMP,"):
        return "azure"
    fields = next((set(line) for _, line in islice(json_lines(path), 1)), set())
    for name, marks in (
        ("mooncake", {"hash_ids"}),
        ("coding_agent", {"requests", "block_size"}),
        ("messages", {"messages"}),
        ("messages", {"input", "output", "timestamp"}),
    ):
        if marks <= fields:
            return name
    raise TraceError(f"{path.name}: none of {', '.join(LOADERS)}: name the format")
