# SPDX-License-Identifier: Apache-2.0
"""How processes divide into ranks and shards, and where their pages lie: every offset is computed here alone."""

from banyan.layout.block import BlockGeometry
from banyan.layout.geometry import PoolGeometry
from banyan.layout.member_slots import MemberSlots
from banyan.layout.namespace import Namespace
from banyan.layout.page import PageLayout, cacheable_tokens
from banyan.layout.ranks import Layout

__all__ = [
    "BlockGeometry",
    "Layout",
    "MemberSlots",
    "Namespace",
    "PageLayout",
    "PoolGeometry",
    "cacheable_tokens",
]
