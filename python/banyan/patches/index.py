# SPDX-License-Identifier: Apache-2.0
"""Prints ``docs/patches.md``: ``python -m banyan.patches.index > docs/patches.md``."""

from __future__ import annotations

from banyan import SGLANG_VERSION, patches

HEAD = f"""# The patch queue

Every place where Banyan touches sglang=={SGLANG_VERSION}. Generated from `patches/*.toml`; a test keeps it true.
`before`, `after` and `around` are hooks of SGLang's plugin registry; `register` adds to a registry of SGLang's;
`subclass` and `call` are upstream sources that Banyan inherits from or relies on, watched by fingerprint only.

A patch is a record and changes no file: a TOML file with the place (`target`), the kind, the processes, the hook that
is installed there, why, when it can go, and a fingerprint of the upstream source. `banyan.patches` reads the files and
compares fingerprints; `sglang_plugin/seams.py` installs the hooks in each process. Where a fingerprint differs, Banyan
turns itself off.

| patch | kind | where | why | can go when |
|---|---|---|---|---|
"""


def page() -> str:
    """The whole page as Markdown."""
    rows = []
    for patch in patches.load_queue():
        where = "<br>".join((f"`{patch.target}`", f"in the {', '.join(patch.processes)} process"))
        rows.append(f"| {patch.name} | {patch.kind} | {where} | {patch.why} | {patch.remove_when} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(page(), end="")
