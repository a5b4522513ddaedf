# SPDX-License-Identifier: Apache-2.0
"""Copies that do not begin before somebody waits for them, and then take a while.

So a forward that waits reads right pages, and one that does not wait reads none of them, on every run. `plugin` makes
the folder that has servers load this.
"""

import os
import time
from pathlib import Path

DELAY_VARIABLE = "LATE_COPIES_DELAY_S"


class LateCopy:
    """A copy that is started by the first call or look at it, ``delay_s`` later."""

    def __init__(self, start, delay_s):
        self._start = start
        self._delay_s = delay_s
        self._copy = None

    def __getattr__(self, name):
        if self._copy is None:
            time.sleep(self._delay_s)
            self._copy = self._start()
        return getattr(self._copy, name)


class LatePeers:
    def __init__(self, peers, delay_s=0.0):
        self._peers = peers
        self._delay_s = delay_s

    def __getattr__(self, name):
        return getattr(self._peers, name)

    def start_copy(self, *args):
        return LateCopy(lambda: self._peers.start_copy(*args), self._delay_s)


def install():
    """Make every copy of this process late. SGLang calls it once in each process of a server."""
    from banyan import supply

    init = supply.Supply.__init__
    if hasattr(init, "is_late"):
        return

    def init_late(self, peers, *others, **named):
        init(self, LatePeers(peers, float(os.environ.get(DELAY_VARIABLE, "0"))), *others, **named)

    init_late.is_late = True
    supply.Supply.__init__ = init_late


def plugin(folder, *, delay_s=0.0):
    """Variables of a server whose copies are late; ``folder`` is empty and stays."""
    described = folder / "late_copies-0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: late-copies\nVersion: 0\n")
    (described / "entry_points.txt").write_text("[sglang.srt.plugins]\nlate_copies = late:install\n")
    paths = (str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    return (("PYTHONPATH", os.pathsep.join(paths).rstrip(os.pathsep)), (DELAY_VARIABLE, str(delay_s)))
