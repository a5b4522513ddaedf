# SPDX-License-Identifier: Apache-2.0
"""Where pages rest below DRAM: a store by its URL, behind one interface (``ports.PageStore``).

A backend is a function in ``BACKENDS`` that opens one. ``location`` says what URLs mean.
"""

from banyan.store.backends import BACKENDS, Space, open_store
from banyan.store.location import StoreLocation

__all__ = ["BACKENDS", "Space", "StoreLocation", "open_store"]
