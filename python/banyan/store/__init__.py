# SPDX-License-Identifier: Apache-2.0
"""Where pages rest below DRAM: one interface (``ports.PageStore``), several backends.

``local`` is the native store on local drives, the default. ``hf3fs`` is the same store on a mounted 3FS. ``mooncake``
keeps pages in a Mooncake cluster, ``memory`` in this process, with faults on request. The last two are a plain table
of values below ``ChainedStore``, which adds what a table lacks: chains, checksums, pacing, namespaces.
"""

from banyan.store.chained import ChainedStore, Values
from banyan.store.local import Space, open_hf3fs, open_local
from banyan.store.memory import MemoryFaults, MemoryValues

__all__ = ["ChainedStore", "MemoryFaults", "MemoryValues", "Space", "Values", "open_hf3fs", "open_local"]
