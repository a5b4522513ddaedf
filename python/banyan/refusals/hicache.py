# SPDX-License-Identifier: Apache-2.0
"""HiCache's flags in Banyan's words, for who has them in a launch line."""

from __future__ import annotations

STORES = {
    "file": "FOLDER",
    "hf3fs": "3fs://FOLDER",
    "mooncake": "mooncake://HOST:PORT",
    "nixl": "nixl+posix://FOLDER",
}
"""``--banyan-store`` for each of SGLang's storage backends that keeps pages in the same place."""


def in_banyans_words(*, size_gb: int, num_processes: int, backend: str | None) -> str:
    """What takes the place of HiCache's flags. SGLang's size is that of each process, Banyan's that of the node;
    neither needs one."""
    size = f"--banyan-host-gb {size_gb * num_processes}" if size_gb else "its host arena, on by default"
    if backend is None:
        return size
    if backend not in STORES:
        return f"{size}, and no store like {backend}"
    return f"{size}, and --banyan-store {STORES[backend]} --banyan-store-gb GB"
