# SPDX-License-Identifier: Apache-2.0
"""A real store in which pages come and go, in any order, and routers that hear of it from the start or later: they
believe nothing that has gone, and in the end know all that is there."""

from __future__ import annotations

import hashlib
import tempfile

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.utils import hash_str_to_int64
from test.conftest import examples

from banyan._native import SharedBytes, Store
from banyan.router.blocks import BITS, STORE
from banyan.router.events import BlockRemoved, BlockStored, EventBatch, EventFeed
from banyan.sglang_plugin.rank.reporting.store_events import AGAIN_S, StoreEvents

FRAME_BYTES = 4096
NUM_CHAINS, CHAIN = 6, 4
NAMESPACES = (b"a" * 32, b"b" * 32)


def key(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


CHAINS = [[key(chain * CHAIN + page) for page in range(CHAIN)] for chain in range(NUM_CHAINS)]
KEYS = [one for chain in CHAINS for one in chain]
steps = st.one_of(
    st.tuples(st.just("put"), st.integers(0, NUM_CHAINS - 1)),
    st.tuples(st.just("evict"), st.integers(1, 2 * CHAIN)),
    st.tuples(st.just("namespace"), st.sampled_from(NAMESPACES)),
    st.tuples(st.just("tell"), st.none()),
    st.tuples(st.just("router"), st.none()),
)


class World:
    """A store, who tells of it, and the routers that listen."""

    def __init__(self, folder):
        # Room for fewer pages than there are.
        options = {"quota_bytes": 160 << 10, "floor_bytes": 0, "engine": "threads"}
        self.store = Store.open([folder], NAMESPACES[0], [FRAME_BYTES], **options)
        self.memory = SharedBytes.create(CHAIN * FRAME_BYTES, "arena")
        self.now_s, self.seq = 0.0, 0
        self.told = StoreEvents(self.store, lambda: self.now_s)
        self.routers = [EventFeed()]

    def put(self, chain):
        frames = np.arange(CHAIN, dtype=np.int64) * FRAME_BYTES
        self.store.put(CHAINS[chain], None, self.memory, frames)
        self.store.sync()

    def evict(self, num_pages):
        self.store.evict(num_pages)

    def namespace(self, namespace):
        self.store.invalidate(namespace)

    def router(self, _):
        self.routers.append(EventFeed())

    def tell(self, _):
        kinds = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved}
        events = [kinds[type(event).__name__](event.block_hashes, event.medium.value) for event in self.told.take()]
        for feed in self.routers:
            feed.apply(self.seq, EventBatch(1.0 + self.seq, events))
        self.seq += 1
        for feed in self.routers:
            assert self.known(feed) <= self.held(), "a page that has gone"

    def known(self, feed):
        bits = BITS[STORE]
        return {key for key in KEYS if feed.blocks.run([hash_str_to_int64(key)], 0, bits)}

    def held(self):
        return {key for key in KEYS if self.store.lookup([key]).num_pages}


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(steps, max_size=25))
def test_routers_when_pages_come_and_go_then_they_believe_nothing_that_has_gone_and_learn_all_that_is_there(taken):
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="banyan-test-") as folder:
        world = World(folder)
        try:
            for name, value in taken:
                getattr(world, name)(value)
            # To the end of this round, and one round more, for who came late.
            for _ in range(5):
                world.tell(None)
                world.now_s += AGAIN_S
            assert all(world.known(feed) == world.held() for feed in world.routers)
        finally:
            world.store.close()
