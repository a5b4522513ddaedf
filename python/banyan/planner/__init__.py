# SPDX-License-Identifier: Apache-2.0
"""What a request does with its uncached tail: fetch, load or recompute, and where moving stops paying."""
