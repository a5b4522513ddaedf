# SPDX-License-Identifier: Apache-2.0
"""A scheduler process: one shard of one rank. Read `linker` first, then `membership` and `tiers`."""
