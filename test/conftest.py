# SPDX-License-Identifier: Apache-2.0
"""Property tests judge answers, not how fast a shared machine gives them. `--hypothesis-profile=long` looks longer."""

import os

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.register_profile("long", deadline=None, max_examples=20_000)
settings.load_profile("no deadline")

# For `make fuzz EXAMPLES=...`, which names it on the command line.
settings.register_profile("fuzz", deadline=None, max_examples=int(os.environ.get("EXAMPLES", "1000")))
USUAL_EXAMPLES = 100


def examples(usual: int) -> int:
    """How many examples a test draws that usually draws so many: more under a profile that has more."""
    return usual * settings.default.max_examples // USUAL_EXAMPLES
