# SPDX-License-Identifier: Apache-2.0
"""Copies that do not begin before somebody waits for them.

So a forward that waits reads right pages, and one that does not wait reads none of them, on every run.
"""

from banyan import cache


class LateCopy:
    """A copy that is started by the first call or look at it."""

    def __init__(self, start):
        self._start = start
        self._copy = None

    def __getattr__(self, name):
        if self._copy is None:
            self._copy = self._start()
        return getattr(self._copy, name)


class LatePeers:
    def __init__(self, peers):
        self._peers = peers

    def __getattr__(self, name):
        return getattr(self._peers, name)

    def start_copy(self, *args):
        return LateCopy(lambda: self._peers.start_copy(*args))


def install():
    """Make every copy of this process late."""
    init = cache.PrefixCache.__init__

    def init_late(self, *, peers, **others):
        init(self, peers=LatePeers(peers), **others)

    cache.PrefixCache.__init__ = init_late
