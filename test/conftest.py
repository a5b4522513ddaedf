# SPDX-License-Identifier: Apache-2.0
"""Property tests judge answers, not how fast a shared machine gives them. `--hypothesis-profile=long` looks longer."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.register_profile("long", deadline=None, max_examples=20_000)
settings.load_profile("no deadline")
