# SPDX-License-Identifier: Apache-2.0
"""A share of arena and store for each tenant: whoever has more than it makes room first."""

from banyan.feature import Parts

PARTS = Parts(page="router.md", flags=("tenant_share",), rank="banyan.features.tenant_share.rank.owner_hooks:register")
