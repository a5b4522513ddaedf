# SPDX-License-Identifier: Apache-2.0
"""Pages of any layout from many places into one: a Triton kernel, and its launch, which imports Triton late."""
