# SPDX-License-Identifier: Apache-2.0
"""Geometry of pages: every offset of a pool is computed here and nowhere else."""

from banyan.layout.block import BlockGeometry
from banyan.layout.geometry import Extent, PoolGeometry
from banyan.layout.namespace import Namespace

__all__ = ["BlockGeometry", "Extent", "Namespace", "PoolGeometry"]
