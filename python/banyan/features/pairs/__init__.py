# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode servers: what each of the two does, and how a request is brought to both."""

from banyan.feature import Parts
from banyan.features.pairs.launched import launched
from banyan.features.pairs.roles import Role

__all__ = ["PARTS", "Role"]

PARTS = Parts(
    page="pd.md",
    flags=("ib_service_level",),
    launched=launched,
    rank="banyan.features.pairs.rank.at_rank:register",
)
