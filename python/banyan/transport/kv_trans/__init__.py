# SPDX-License-Identifier: Apache-2.0
"""Pages of any layout from many places into one: a Triton kernel, its launch, and a slow reference beside it.

``kernel`` imports Triton and ``reference`` imports torch; ``launch`` imports them when it is used.
"""
