# SPDX-License-Identifier: Apache-2.0
"""THE seam: the only package that imports SGLang.

SGLang calls ``register`` once in each of its processes, before it reads any argument. Without ``--enable-banyan``
every hook passes through.
"""

from __future__ import annotations


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``."""
    # Imported here: the package must import where SGLang is not installed (documentation, `banyan doctor`).
    from banyan.sglang_plugin import seams

    seams.register()
