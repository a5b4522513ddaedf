# SPDX-License-Identifier: Apache-2.0
"""Where SGLang looks for the operator that makes trees of n-grams."""

from sgl_kernel.speculation import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
