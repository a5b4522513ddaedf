# SPDX-License-Identifier: Apache-2.0
"""A prompt's end read by a node that fails in every way: no wrong byte lands, what can be read here is, nothing is
left."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path

from test.property.test_transport_faults import NUM_PAGES, TARGETS, Fault, Lender, Wire
from test.unit.cache_rig import request
from test.unit.directory.rig import frames, keys
from test.unit.features.nodes.rig import BLOCK, StoreNode, until

from banyan import _native
from banyan.arena.page_source import all_that_is_found
from banyan.features.nodes.pull import NodeFound
from banyan.features.nodes.remote_leases import TERM_S

NUM_SEEDS = 1_500
NODE = "there:1"
PROMPT = keys(*range(1, NUM_PAGES + 1))


class RemotePrefetch(Enum):
    """What becomes of a remote prefetch."""

    DONE = auto()
    DONE_IN_PART = auto()
    NOTHING_COMES = auto()
    CANNOT_BE_ASKED = auto()
    IS_A_LIE = auto()
    """The node says that the pages are there, and has none of them."""


class RemotePrefetchWire(Wire):
    """``Wire``, with a node that brings pages from its store."""

    def __init__(self, lender: Lender, memory: _native.SharedBytes) -> None:
        super().__init__(lender, memory)
        self.remote_prefetch = RemotePrefetch.DONE

    def send(self, node: str, asked: Sequence[str]) -> int | None:
        assert node == NODE
        if self.remote_prefetch is RemotePrefetch.CANNOT_BE_ASKED:
            return None
        num_pages = len(asked)
        if self.remote_prefetch is RemotePrefetch.DONE_IN_PART:
            num_pages = self._rng.randrange(len(asked))
        if self.remote_prefetch is RemotePrefetch.NOTHING_COMES:
            num_pages = 0
        if self.remote_prefetch is RemotePrefetch.IS_A_LIE:
            self._lender.lending.withdraw()
        self._answers.append((1, NodeFound(NODE, 0, asked[:num_pages]) if num_pages else None))
        return 1


def test_prompt_when_the_node_that_reads_its_end_fails_then_no_wrong_byte_lands_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    lender = Lender()
    content = bytes(memoryview(lender.node.memory))
    writer = StoreNode(tmp_path)
    assert writer.keep(range(1, NUM_PAGES + 1), range(NUM_PAGES)) == lender.pages, "both nodes have the same pages"
    writer.close()
    p = StoreNode(tmp_path, num_frames=3 * NUM_PAGES)
    p.save(range(1, NUM_PAGES + 1), range(NUM_PAGES))
    wire = RemotePrefetchWire(lender, p.memory)
    p.borrow_through(wire)
    outcomes: Counter[tuple[RemotePrefetch, Fault, bool]] = Counter()
    for seed in range(NUM_SEEDS):
        rng = random.Random(f"remote_prefetch-{seed}")
        wire.set_fault(rng, rng.choice([fault for fault in Fault if fault is not Fault.GIVEN_UP]))
        wire.remote_prefetch = rng.choice(list(RemotePrefetch))
        outcomes[wire.remote_prefetch, wire._fault, fetch(p, lender, rng)] += 1
        lender.recover(wire._fault, content)
        lender.lending.lend(lender.exported)
        nothing_is_left(p, lender)
    p.close()
    assert len({(remote_prefetch, fault) for remote_prefetch, fault, _ in outcomes}) == len(RemotePrefetch) * (
        len(Fault) - 1
    )
    assert all(landed for _, _, landed in outcomes), "a fault that is seen before the forward costs no attempt"
    assert min(p.counters.pull_pages, p.counters.pull_failed_pages) > 300, "both ways were gone"


def fetch(p: StoreNode, lender: Lender, rng: random.Random) -> bool:
    """The whole prompt into the pool; whether it landed."""
    p.arrive("r", PROMPT, 0, all_that_is_found, node=NODE, first_page=rng.randrange(NUM_PAGES))
    p.poll()
    assert not p.remote.is_sent_for("r")
    offer = p.cache.prepare(request("r"), PROMPT)
    assert offer.num_pages == NUM_PAGES, "what nobody brings is read here"
    assert p.cache.admit("r", PROMPT, frames(*TARGETS)) is not None
    landed = p.cache.finish(p.cache.start())
    if landed:
        assert [p.rank.pages(frame) for frame in TARGETS] == lender.pages
    return landed


def nothing_is_left(p: StoreNode, lender: Lender) -> None:
    """And all that has become resident is right; then it is forgotten."""
    until(lambda: p.poll() or not p.residency.num_filling)
    for page, key in enumerate(PROMPT):
        frame = p.residency.frame(key)
        if frame is not None:
            start = frame * BLOCK.frame_bytes
            assert bytes(memoryview(p.memory)[start : start + BLOCK.block_bytes]) == b"".join(lender.pages[page])
    remote_leases = lender.lending.remote_leases
    if remote_leases.num_remote_leases:
        # What nobody gives back runs out.
        lender.now_s += TERM_S
        remote_leases.expire()
    assert (remote_leases.num_remote_leases, remote_leases.num_pages) == (0, 0)
    p.residency.reset()
