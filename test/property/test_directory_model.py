# SPDX-License-Identifier: Apache-2.0
"""The native directory and its model, driven with the same calls, answer the same."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from test.conftest import examples
from test.property.directory_model import ModelFrameTable, ModelPeers, ModelRankTable

from banyan import _native as native

NUM_SLOTS = 3
NUM_FRAMES = 6
PAGE_BYTES = 64
GEOMETRY = [[(0, PAGE_BYTES), (NUM_FRAMES * PAGE_BYTES, PAGE_BYTES)]]
NAMESPACE = b"n" * 32
KEYS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(8)]

slots = st.integers(0, NUM_SLOTS - 1)
frame_lists = st.lists(st.integers(-1, NUM_FRAMES), max_size=4)
pairs = st.lists(st.tuples(st.integers(0, NUM_FRAMES - 1), st.sampled_from(KEYS)), max_size=6)
# Mostly stretches of one chain from near its front, as prefixes are; sometimes anything.
chains = st.builds(
    lambda first, length: KEYS[first : first + length], st.sampled_from([0, 0, 0, 1, 3]), st.integers(1, 6)
)
key_lists = st.one_of(chains, chains, st.lists(st.sampled_from(KEYS), max_size=6))


def frames_array(frames: list[int]) -> np.ndarray:
    return np.array(frames, dtype=np.int64)


def outcome(call) -> object:
    """What a call returns, or that it was refused."""
    try:
        return call()
    except ValueError:
        return ValueError


def sorted_frames(result: object) -> object:
    if isinstance(result, bytes):
        result = np.frombuffer(result, dtype=np.int64).tolist()
    return sorted(result) if isinstance(result, list) else result


class DirectoryMachine(RuleBasedStateMachine):
    matches = Bundle("matches")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.rank_table = native.RankTable.create(NUM_SLOTS)
        self.pools = [native.SharedBytes.create(2 * NUM_FRAMES * PAGE_BYTES, "pool") for _ in range(NUM_SLOTS)]
        self.model_rank_table = ModelRankTable(NUM_SLOTS)
        self.frame_tables: dict[int, tuple[native.FrameTable, ModelFrameTable]] = {}
        self.peers = [
            (
                native.Peers(self.rank_table, slot, slot, NAMESPACE, GEOMETRY, self.pools[slot]),
                ModelPeers(self.model_rank_table, slot),
            )
            for slot in range(NUM_SLOTS)
        ]
        self.seen: tuple[dict, dict] = {}, {}
        for slot in range(NUM_SLOTS):
            self.attach(slot)

    def attach(self, slot: int) -> None:
        frame_table = native.FrameTable(self.rank_table, slot, NAMESPACE, self.pools[slot], NUM_FRAMES, GEOMETRY)
        self.frame_tables[slot] = frame_table, ModelFrameTable(self.model_rank_table, slot, NUM_FRAMES)

    @rule(slot=slots)
    def join(self, slot: int) -> None:
        if slot not in self.frame_tables:
            self.attach(slot)

    @rule(slot=slots, often=st.integers(0, 3))
    def leave(self, slot: int, often: int) -> None:
        if slot in self.frame_tables and often == 0:
            frame_table, model = self.frame_tables.pop(slot)
            frame_table.close()
            model.close()

    @rule(slot=slots, pairs=pairs)
    def publish(self, slot: int, pairs: list[tuple[int, str]]) -> None:
        if slot in self.frame_tables:
            frame_table, model = self.frame_tables[slot]
            frames, keys = [frame for frame, _ in pairs], [key for _, key in pairs]
            assert outcome(lambda: frame_table.publish(frames_array(frames), keys)) == outcome(
                lambda: model.publish(frames, keys)
            )

    @rule(slot=slots, chain=chains)
    def publish_idle(self, slot: int, chain: list[str]) -> None:
        """What a rank does: frames it may write, and the keys of one prompt."""
        if slot in self.frame_tables:
            frame_table, model = self.frame_tables[slot]
            idle = [f for f in range(NUM_FRAMES) if f not in model.published and f not in model.quarantine]
            frames, keys = idle[: len(chain)], chain[: len(idle)]
            assert frame_table.publish(frames_array(frames), keys) == model.publish(frames, keys)

    @rule(slot=slots, wanted=st.sets(st.integers(0, NUM_FRAMES - 1), min_size=1))
    def retire_published(self, slot: int, wanted: set[int]) -> None:
        if slot in self.frame_tables:
            self.check_retire(slot, [frame for frame in wanted if frame in self.frame_tables[slot][1].published])

    @rule(slot=slots, frames=frame_lists)
    def retire(self, slot: int, frames: list[int]) -> None:
        if slot in self.frame_tables:
            self.check_retire(slot, frames)

    def check_retire(self, slot: int, frames: list[int]) -> None:
        frame_table, model = self.frame_tables[slot]
        freed = sorted_frames(outcome(lambda: frame_table.retire(frames_array(frames))))
        assert freed == sorted_frames(outcome(lambda: model.retire(frames)))
        self.check_unleased(model, freed)

    @rule(slot=slots)
    def drain(self, slot: int) -> None:
        if slot in self.frame_tables:
            frame_table, model = self.frame_tables[slot]
            freed = sorted_frames(frame_table.drain())
            assert freed == sorted_frames(model.drain())
            self.check_unleased(model, freed)

    @rule(slot=slots)
    def reset(self, slot: int) -> None:
        if slot in self.frame_tables:
            for frame_table in self.frame_tables[slot]:
                frame_table.reset()

    @rule(slot=slots)
    def look_for_news(self, slot: int) -> None:
        """A rank sees another version where what is published is another one, or who is there, and nowhere else."""
        published = frozenset((model, model.version) for _, model in self.frame_tables.values())
        version = self.peers[slot][0].version()
        of_version, of_published = self.seen
        assert of_version.setdefault((slot, version), published) == published
        assert of_published.setdefault((slot, published), version) == version

    @rule(target=matches, slot=slots, keys=key_lists)
    def look_up(self, slot: int, keys: list[str]) -> object:
        return self.check_look_up(slot, keys)

    def check_look_up(self, slot: int, keys: list[str]) -> tuple:
        peers, model = self.peers[slot]
        found, expected = peers.lookup(keys), model.lookup(keys)
        assert (found.num_pages, self.joined(found.runs)) == (expected.num_pages, expected.runs)
        assert peers.prefix_lens(keys) == model.prefix_lens(keys)
        return slot, found, expected, keys

    @rule(target=leases, slot=slots, keys=chains)
    def look_up_and_lease(self, slot: int, keys: list[str]) -> object:
        """What a rank does: nothing happens between its lookup and its lease."""
        return self.check_lease(self.check_look_up(slot, keys), 0)

    @rule(target=leases, match=matches, missing=st.integers(-1, 2))
    def lease(self, match, missing: int) -> object:
        return self.check_lease(match, missing)

    @rule(target=leases, match=matches, keys=key_lists)
    def lease_other_pages(self, match, keys: list[str]) -> object:
        """A caller that remembers the wrong lookup."""
        slot, found, expected, _ = match
        return self.check_lease((slot, found, expected, keys), expected.num_pages - len(keys))

    def check_lease(self, match, missing: int) -> object:
        slot, found, expected, keys = match
        peers, model = self.peers[slot]
        num_pages = max(0, expected.num_pages - missing)
        named = [*keys, *KEYS][:num_pages]
        held = outcome(lambda: peers.lease(found, named))
        wanted = outcome(lambda: model.lease(expected, named))
        if wanted is None or wanted is ValueError:
            assert held is wanted
            return multiple()
        assert held.num_pages == num_pages
        return held, wanted

    @rule(lease=leases)
    def release_and_keep(self, lease) -> None:
        for side in lease:
            side.release()

    @rule(lease=consumes(leases))
    def drop(self, lease) -> None:
        # The native lease is given back by its last reference; the bundle's goes with the rule.
        for side in lease:
            side.release()

    @staticmethod
    def joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Two runs in a row of one peer are two to the native code and one to the model."""
        joined: list[tuple[int, int]] = []
        for slot, length in runs:
            before = joined.pop()[1] if joined and joined[-1][0] == slot else 0
            joined.append((slot, before + length))
        return joined

    @staticmethod
    def check_unleased(model: ModelFrameTable, freed: object) -> None:
        if isinstance(freed, list):
            assert not [frame for frame in freed if model.pins[frame]], "a leased frame was handed out"

    @invariant()
    def counts_agree(self) -> None:
        for frame_table, model in self.frame_tables.values():
            assert frame_table.num_published == model.num_published
            assert frame_table.num_quarantined == model.num_quarantined


DirectoryMachine.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=50, suppress_health_check=list(HealthCheck)
)
TestDirectoryModel = DirectoryMachine.TestCase
