# SPDX-License-Identifier: Apache-2.0
"""Pages between the pools of ranks on GPUs: CUDA IPC to reach them, a kernel to copy them, streams to order it all.

Read in this order: ``driver`` (the calls we make), ``description`` (how a pool is announced),
``mappings`` (the pools of peers, opened), ``places`` (where a kernel finds them), ``page_lists`` (which pages),
``copies`` (one batch on the copy stream), ``gpu_io`` (reads of the store that it follows), ``peers`` (the edge that
``banyan.cache`` knows), ``readback`` (page numbers that only the GPU knows yet).
Nothing here imports torch, Triton or the CUDA bindings when it is imported.
"""
