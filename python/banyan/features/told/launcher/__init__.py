# SPDX-License-Identifier: Apache-2.0
"""What clients tell the cache, in the processes that they reach."""
