# SPDX-License-Identifier: Apache-2.0
"""``banyan replay``: the replay harness of the checkout. It needs HTTP and plotting libraries: it is not packaged."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run ``benchmark.trace_replay`` with these arguments; 2 where there is no checkout to run it from."""
    try:
        harness = importlib.import_module("benchmark.trace_replay")
    except ModuleNotFoundError as error:
        print(
            f"banyan replay: {error.name} is not here: run it in a checkout of Banyan after `make setup`",
            file=sys.stderr,
        )
        return 2
    status: int = harness.main(argv)
    return status
