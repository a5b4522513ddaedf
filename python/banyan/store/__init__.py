# SPDX-License-Identifier: Apache-2.0
"""Where pages rest below DRAM: a store by its URL, behind one interface (``ports.PageStore``).

A backend is a function in ``BACKENDS`` that opens one. ``location`` says what URLs mean. Files are kept by the native
core; libraries that keep values by name (``values``) are put behind the same interface by ``keyed``.
"""

from banyan.store.backends import BACKENDS, Space, asked_store, look, open_store, telling_store
from banyan.store.keyed import KeyedStore
from banyan.store.location import StoreLocation

__all__ = ["BACKENDS", "KeyedStore", "Space", "StoreLocation", "asked_store", "look", "open_store", "telling_store"]
