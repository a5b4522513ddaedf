# SPDX-License-Identifier: Apache-2.0
"""THE seam: the only package that imports SGLang.

SGLang calls ``register`` once in each of its processes, before it reads any argument. Without ``--enable-banyan``
every hook passes through. On another release of SGLang there are none (``other_release``).

A folder says which process runs its files (the patches say the same, and a test compares):

* ``launcher/``    the main process: flags, refusals, what clients read
* ``dispatcher/``  the data-parallel controller: where a request runs
* ``rank/``        a scheduler process: one shard of one rank
* ``pools/``       also a scheduler process: its KV pool, on the host or on a GPU

The files beside this one run in each of them.
"""

from __future__ import annotations

import importlib.metadata


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``."""
    # Imported here: the package must import where SGLang is not installed (documentation, `banyan doctor`).
    from banyan.config import names_flags
    from banyan.refusals import is_release
    from banyan.sglang_plugin import other_release

    try:
        version = importlib.metadata.version("sglang")
        if is_release(version):
            from banyan.sglang_plugin import seams

            seams.register()
        else:
            other_release.register(version)
    except Exception as error:
        # SGLang goes on without its plugin, and nobody would hear these flags.
        if names_flags():
            other_release.refuse(str(error))
        raise
