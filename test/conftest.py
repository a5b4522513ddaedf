# SPDX-License-Identifier: Apache-2.0
"""Property tests judge answers, not how fast a shared machine gives them."""

import os

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# gRPC's threads outlive the test that had a server. Its own handlers of a fork would abort what another test starts.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
