# SPDX-License-Identifier: Apache-2.0
"""The files that SGLang was told to load, in a folder or from a hub, and whether they have stayed what they were.

SGLang loads them, and Banyan digests them: what was put in their place in between would be digested under the name of
what was loaded. So the main process notes what it sees before anything is loaded or digested, and each rank looks again
when both have been done.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from banyan.layout.checkpoint import states_of

Noted = tuple[str, str | None, dict[str, str]]
"""What SGLang was told to load, of which revision, and the states of its files."""


def folder_of(path: str, revision: str | None = None) -> Path:
    """Where the files lie.

    Raises:
        OSError, ValueError: when nothing of that name is on this machine.
    """
    folder = Path(path)
    return folder if folder.is_dir() else Path(snapshot_download(path, revision=revision, local_files_only=True))


def note(path: str, revision: str | None = None) -> Noted:
    """What is there now: no files where SGLang has yet to bring them."""
    try:
        return path, revision, states_of(Path(path) if Path(path).is_file() else folder_of(path, revision))
    except (OSError, ValueError):
        return path, revision, {}


def changed(noted: Iterable[Any]) -> str | None:
    """The first file that is another one than when it was noted."""
    for path, revision, before in noted:
        now = note(path, revision)[2]
        # Files of a hub come while SGLang loads.
        names = before.keys() | now.keys() if Path(path).exists() else before.keys()
        for name in sorted(names):
            if before.get(name) != now.get(name):
                return name
    return None
