# SPDX-License-Identifier: Apache-2.0
"""Models that keep their sliding windows in a pool of their own: window pages beside full pages."""

from banyan.feature import Parts

PARTS = Parts(page="compatibility.md", rank="banyan.features.windows.rank.kinds_of_windows:register")
