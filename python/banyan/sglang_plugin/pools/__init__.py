# SPDX-License-Identifier: Apache-2.0
"""A rank's pool in its process: `host_*` in shared memory, `device_*` on a GPU.

`access` is what the rank knows of either; `choose` says which pool and allocator it gets.
"""
