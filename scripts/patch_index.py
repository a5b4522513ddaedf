# SPDX-License-Identifier: Apache-2.0
"""The text of ``docs/patches.md`` and the tables of features and of patches."""

from __future__ import annotations

from collections.abc import Sequence

from banyan import SGLANG_VERSION, patches
from banyan.config import Config
from banyan.feature import Feature
from banyan.feature_list import FEATURES, installed
from banyan.knobs import knobs_of

HEAD = f"""# The patch queue

Every place where Banyan touches sglang=={SGLANG_VERSION}. Generated from `patches/*/*.toml`; a test keeps it true.
`before`, `after` and `around` are hooks of SGLang's plugin registry; `register` adds to a registry of SGLang's;
`subclass` and `call` are upstream sources that Banyan inherits from or relies on, which are watched only.

A patch is a record and changes no file: a TOML file with the place (`target`), the kind, the processes, the hook that
is installed there, why, and when it can go. Its folder is the feature that it belongs to. Of each upstream definition
that it depends on it has a fingerprint: of the `signature`, where the hook only receives, or of the `body`.
`banyan.patches` reads the files and compares fingerprints; `sglang_plugin/hook_queue.py` installs the hooks in each
process. The CPU engine is a plugin of its own with a queue of its own ([cpu-engine.md](cpu-engine.md)).
Where a fingerprint differs, the feature of the patch is off, and says so; without one of `core` Banyan is off
([releases.md](releases.md)).
"""

COLUMNS = "| patch | kind | where | depends on | why | can go when |\n|---|---|---|---|---|---|"


def page() -> str:
    """The whole page as Markdown."""
    queue = patches.load_queue()
    groups = [(feature, [patch for patch in queue if patch.feature == feature.name]) for feature in FEATURES]
    parts = [_section(feature, group) for feature, group in groups if group]
    return "\n".join([HEAD, *parts])


def table(queue: Sequence[patches.Patch]) -> str:
    """A row for each patch."""
    return "\n".join([COLUMNS, *map(_row, queue)])


def feature_table() -> str:
    """What each feature is when it is off."""
    queue, folders = patches.load_queue(), installed()
    flags = {field: knob.flag for field, _, knob in knobs_of(Config)}
    rows = []
    for feature in FEATURES:
        parts = folders.get(feature.name)
        page = "" if parts is None else f"[{parts.page}]({parts.page})"
        own = "" if parts is None else ", ".join(f"`{flags[field]}`" for field in parts.flags)
        num_patches = sum(patch.feature == feature.name for patch in queue)
        rows.append(f"| `{feature.name}` | {num_patches} | {own} | {page} | {feature.instead} |")
    head = "| feature | patches | flags of its own | its folder's page | where it is off |\n|---|---|---|---|---|"
    return "\n".join([head, *rows])


def _section(feature: Feature, queue: Sequence[patches.Patch]) -> str:
    severable = " Each patch by itself." if feature.is_severable else ""
    return f"## {feature.name}\n\nOff: {feature.instead}.{severable}\n\n{table(queue)}\n"


def _row(patch: patches.Patch) -> str:
    where = "<br>".join(
        (*(f"`{place.target}`" for place in patch.places), f"in the {', '.join(patch.processes)} process")
    )
    kinds = sorted({source.watches for source in patch.places})
    own = f"its {' and '.join(kinds)}"
    others = [f"{source.watches} of `{'.'.join(source.target.split('.')[-2:])}`" for source in patch.relies_on]
    reasons = dict.fromkeys(source.why for source in patch.relies_on)
    return (
        f"| {patch.name} | {patch.kind} | {where} | {'<br>'.join((own, *others))} | "
        f"{'<br>'.join((patch.why, *reasons))} | {patch.remove_when} |"
    )
