# SPDX-License-Identifier: Apache-2.0
"""A node that lends a few large pages until it is killed. Arguments: the port of its page server; a plugin of NIXL, if
it lends by that."""

from __future__ import annotations

import sys
import types
from pathlib import Path

# As pytest finds it: Python's own package of that name would come first.
sys.modules.setdefault("test", types.ModuleType("test")).__path__ = [str(Path(__file__).parents[1])]

from test.unit.features.nodes.rig import Node, until  # noqa: E402

from banyan.core import Address  # noqa: E402
from banyan.features.nodes.nixl_pulls import LentByNixl  # noqa: E402

LAYER_BYTES = 4 << 20
NUM_PAGES = 8
"""96 MiB: what is left behind the first of the layers is more than the buffers of a connection may hold (tcp_rmem)."""


def node() -> Node:
    return Node(num_frames=NUM_PAGES, layer_bytes=LAYER_BYTES)


def main() -> None:
    lender = node()
    lender.keep(range(NUM_PAGES), range(NUM_PAGES))
    by_nixl = LentByNixl(sys.argv[2]) if len(sys.argv) > 2 else None
    lender.lend(address=Address("127.0.0.1", int(sys.argv[1])), by_nixl=by_nixl)
    until(lambda: by_nixl is None or by_nixl.is_ready, timeout_s=60)
    print("lending", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
