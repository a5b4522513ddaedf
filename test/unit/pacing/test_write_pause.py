# SPDX-License-Identifier: Apache-2.0
from banyan.pacing.write_pause import WritePause


class Store:
    def __init__(self):
        self.told = []

    def pause_writes(self):
        self.told.append("pause")

    def open_writes(self):
        self.told.append("open")


def test_prefill_when_it_runs_then_nothing_is_written_until_it_ends():
    store = Store()
    ours = WritePause(store)
    ours.begin_prefill()
    ours.end()
    assert store.told == ["pause", "open"]


def test_decode_when_steps_follow_each_other_then_the_store_stays_open():
    store = Store()
    ours = WritePause(store)
    for _ in range(3):
        ours.end()
    assert store.told == []


def test_prefill_when_nobody_tells_its_end_then_the_second_step_without_another_one_writes_again():
    """Of a server that decodes nothing (embeddings, prefills for others), on a GPU."""
    store = Store()
    ours = WritePause(store)
    for _ in range(3):
        ours.step()
        ours.begin_prefill()
    assert store.told == ["pause"]
    ours.step()
    assert store.told == ["pause"]
    ours.step()
    ours.step()
    assert store.told == ["pause", "open"]
    ours.begin_prefill()
    assert store.told == ["pause", "open", "pause"]


def test_prefill_when_it_never_ended_then_the_next_one_replaces_it():
    store = Store()
    ours = WritePause(store)
    ours.begin_prefill()
    ours.begin_prefill()
    ours.end()
    ours.end()
    assert store.told == ["pause", "open"]
