# SPDX-License-Identifier: Apache-2.0
"""Who holds which page, and leases on them.

The native core is `banyan._native`; `model` is the same protocol as a model.
"""

MAX_HASHED_PAGES = 256
"""Pages that the dispatcher hashes anew for one request. sha256 is a chain: 2,000 pages of 16 tokens would take 0.2 ms.
Of a longer prompt that ranks hold and the dispatcher has not seen it learns the rest from the requests that follow.
"""
