# SPDX-License-Identifier: Apache-2.0
"""The patch queue: one file for each place where Banyan touches SGLang, in the folder of the feature that needs it.

A file says where (``target``), how (``kind``), with what (``hook``), why, and when it can go; and what of SGLang's
source it depends on, with the digest of what it was written against (``banyan.patches.source``). The queue is read
without importing SGLang, so a changed source is found before anything of it runs.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banyan import SGLANG_VERSION
from banyan.patches.source import WATCHES, definition, fingerprint, parsed_file

HOOKED_KINDS = ("before", "after", "around", "register")
"""The first three are hooks around ``target``; "register" is called once in the process and adds to a registry."""

CONSEQUENCES = ("pass", "stop")
"""What a hook's failure means: SGLang goes on without it; or the process first stops to share, since what the hook was
to do keeps wrong pages from being shared."""

WRITTEN_AGAINST = {"sglang": SGLANG_VERSION, "smg_grpc_servicer": "0.14.1"}
"""The release of each package that patches depend on. Of the second SGLang takes newer ones, too."""

NUM_PATCHES = 75
"""Of Banyan's own queue. One that is not there is a hook that nobody misses: without it pages may be stale, or reused
while they are read."""

KINDS = (*HOOKED_KINDS, "subclass", "call")
"""The last two are upstream sources that Banyan inherits from or calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A definition of SGLang's that a patch depends on. ``watches``: as ``source.fingerprint`` has it."""

    target: str
    watches: str
    fingerprint: str
    why: str = ""

    def __post_init__(self) -> None:
        if self.watches not in WATCHES:
            raise ValueError(f"{self.target}: watches {self.watches!r} is none of {', '.join(WATCHES)}")

    @property
    def package(self) -> str:
        return self.target.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One seam. ``processes`` names where it must take: main (and SGLang's other HTTP workers, where it has some),
    controller, scheduler. A hook is put on ``target``, and
    on those of ``also`` too; ``relies_on`` is what else must be as it was."""

    name: str
    feature: str
    target: str
    kind: str
    processes: tuple[str, ...]
    why: str
    remove_when: str
    watches: str
    fingerprint: str
    hook: str | None = None
    on_failure: str = "pass"
    also: tuple[Source, ...] = ()
    relies_on: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        if self.on_failure not in CONSEQUENCES:
            raise ValueError(f"patch {self.name}: on_failure {self.on_failure!r} is none of {', '.join(CONSEQUENCES)}")
        if self.kind not in KINDS:
            raise ValueError(f"patch {self.name}: kind {self.kind!r} is none of {', '.join(KINDS)}")
        if (self.hook is None) == (self.kind in HOOKED_KINDS):
            raise ValueError(f"patch {self.name}: kind {self.kind} and hook {self.hook} do not go together")

    @property
    def places(self) -> tuple[Source, ...]:
        """Where it is: what a hook is put on."""
        return (Source(target=self.target, watches=self.watches, fingerprint=self.fingerprint), *self.also)

    @property
    def sources(self) -> tuple[Source, ...]:
        """All that it depends on."""
        return (*self.places, *self.relies_on)


@dataclass(frozen=True, slots=True)
class Misfit:
    """A patch does not fit the SGLang that is there, as ``source`` tells."""

    patch: Patch
    source: Source
    reason: str

    def __str__(self) -> str:
        return f"patch {self.patch.feature}/{self.patch.name}: {self.reason}"


def load_queue(folder: Path | None = None) -> list[Patch]:
    """All patches of Banyan's own queue, or of the one in ``folder``, in the order of their file names.

    Raises:
        ValueError: for a file that is not a patch, or that lies in no feature's folder, and where Banyan's own queue is
            not whole.
    """
    if folder is None:
        queue = load_queue(Path(__file__).parent)
        if len(queue) != NUM_PATCHES:
            raise ValueError(f"{len(queue)} patches of {NUM_PATCHES} are installed: install Banyan's wheel anew")
        return queue
    strays = [path.name for path in folder.glob("*.toml")]
    if strays:
        raise ValueError(f"no feature has {', '.join(strays)}: a patch lies in the folder of its feature")
    return [_read(path) for path in sorted(folder.glob("*/*.toml"), key=lambda path: path.name)]


def _read(path: Path) -> Patch:
    fields = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        return Patch(
            name=path.stem,
            feature=path.parent.name,
            **{
                **fields,
                "processes": tuple(fields["processes"]),
                "also": _sources(fields.get("also", ())),
                "relies_on": _sources(fields.get("relies_on", ())),
            },
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.parent.name}/{path.name} is not a patch: {error}") from error


def _sources(tables: Sequence[Mapping[str, Any]]) -> tuple[Source, ...]:
    return tuple(Source(**table) for table in tables)


def changed(queue: Sequence[Patch], folder: Path | None = None) -> list[Misfit]:
    """One misfit for each upstream source that is not the one that a patch was written against; in ``folder``, or as it
    is installed."""
    misfits = []
    # Several patches have their sources in one file, and the longest takes half a second to parse.
    parsed = functools.cache(parsed_file)
    for patch in queue:
        for source in patch.sources:
            try:
                actual = fingerprint(definition(source.target, parsed, folder=folder), source.watches)
            except LookupError as error:
                misfits.append(Misfit(patch, source, str(error)))
                continue
            if actual != source.fingerprint:
                reason = f"{source.target} has another {source.watches} ({source.fingerprint} -> {actual})"
                misfits.append(Misfit(patch, source, reason))
    return misfits
