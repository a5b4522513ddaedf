# SPDX-License-Identifier: Apache-2.0
"""What a rank does with what the cache is told."""
