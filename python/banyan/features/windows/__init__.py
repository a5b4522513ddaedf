# SPDX-License-Identifier: Apache-2.0
"""Models that keep their sliding windows in a pool of their own: window pages beside full pages."""

from banyan.feature import Parts
from banyan.features.windows.sliding import refusals

PARTS = Parts(page="compatibility.md", refusals=refusals, rank="banyan.features.windows.rank.kinds_of_windows:register")
