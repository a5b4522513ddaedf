# SPDX-License-Identifier: Apache-2.0
"""A cache that can be told: prefixes that stay for a while, that are wanted soon, or that nobody wants any more."""

from banyan.feature import Parts

PARTS = Parts(page="told.md", flags=("told_share",), rank="banyan.features.told.rank.told_rank:register")
