# SPDX-License-Identifier: Apache-2.0
"""Property tests judge answers, not how fast a shared machine gives them."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
