# SPDX-License-Identifier: Apache-2.0
"""Stores by URL, beside files: libraries that keep values by name (``values``) are put behind the interface of every
store (``ports.PageStore``) by ``keyed``."""

from banyan.feature import Parts, StoreScheme

MOONCAKE = "mooncake"
NIXL_POSIX = "nixl+posix"

PARTS = Parts(
    page="stores.md",
    stores={
        MOONCAKE: StoreScheme("banyan.features.stores.store_backends:MOONCAKE", is_hosted=True, must_be_asked=True),
        NIXL_POSIX: StoreScheme(
            "banyan.features.stores.store_backends:NIXL_POSIX",
            must_be_asked=True,
            near=("nixl:", "nixl+"),
            near_line=f"of NIXL's plugins POSIX is served: use {NIXL_POSIX}:///folder",
        ),
    },
)
