# SPDX-License-Identifier: Apache-2.0
"""Where pages rest below DRAM: a store by its URL, behind one interface (``ports.PageStore``).

``location`` says what URLs mean, ``backends`` opens what they name. Files are kept by the native core.
"""

from banyan.store.backends import Space, asked_store, look, native_store, open_store
from banyan.store.location import StoreLocation

__all__ = [
    "Space",
    "StoreLocation",
    "asked_store",
    "look",
    "native_store",
    "open_store",
]
