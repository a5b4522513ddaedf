# SPDX-License-Identifier: Apache-2.0
"""Where servers and the router are told what to keep."""

CACHE_PATH = "/banyan/cache"
