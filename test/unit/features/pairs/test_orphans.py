# SPDX-License-Identifier: Apache-2.0
"""Answers that come before their prompts are offered again, within bounds."""

from itertools import pairwise

from banyan.features.pairs import orphans
from banyan.features.pairs.orphans import FIRST_PAUSE_S, MAX_PAUSE_S, PATIENCE_S, Orphans


class Rig:
    """Orphans on a clock of the test's own, and a store that refuses what it is told to."""

    def __init__(self):
        self.now_s = 0.0
        self.offered = []
        self.refuses = True
        self.orphans = Orphans(lambda: self.now_s)

    def offer(self, keys):
        self.offered.append((self.now_s, list(keys)))
        return keys if self.refuses else ()

    def at(self, now_s):
        self.now_s = now_s
        self.orphans.offer_again(self.offer)


def test_orphan_when_its_parent_comes_then_it_is_offered_once_more_and_forgotten():
    rig = Rig()
    rig.orphans.refused(["a", "b"])
    rig.at(FIRST_PAUSE_S / 2)
    assert rig.offered == []
    rig.refuses = False
    rig.at(FIRST_PAUSE_S)
    rig.at(10)
    assert rig.offered == [(FIRST_PAUSE_S, ["a", "b"])]
    assert len(rig.orphans._chains) == 0 and rig.orphans.take_given_up() == 0


def test_orphan_when_its_parent_never_comes_then_the_pauses_grow_and_it_is_given_up():
    rig = Rig()
    rig.orphans.refused(["a", "b"])
    for step in range(800):
        rig.at(step * 0.1)
    times = [now_s for now_s, _ in rig.offered]
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert times[-1] <= PATIENCE_S + 0.01
    assert len(times) < 20 and max(pauses) <= MAX_PAUSE_S + 0.11
    assert len(rig.orphans._chains) == 0
    assert rig.orphans.take_given_up() == 2 and rig.orphans.take_given_up() == 0


def test_orphan_when_only_a_part_is_refused_again_then_only_that_waits():
    rig = Rig()
    rig.orphans.refused(["a", "b"])
    rig.orphans.offer_again(lambda keys: keys)
    rig.now_s = 1.0
    rig.orphans.offer_again(lambda keys: keys[1:])
    rig.now_s = 9.0
    rig.orphans.offer_again(rig.offer)
    assert rig.offered == [(9.0, ["b"])]


def test_orphans_when_too_many_wait_then_the_oldest_is_given_up(monkeypatch):
    monkeypatch.setattr(orphans, "MAX_CHAINS", 2)
    rig = Rig()
    for key in "abc":
        rig.orphans.refused([key])
    assert len(rig.orphans._chains) == 2 and rig.orphans.take_given_up() == 1
    rig.at(1.0)
    assert [keys for _, keys in rig.offered] == [["b"], ["c"]]


def test_clear_when_pages_are_gone_then_nothing_is_offered():
    rig = Rig()
    rig.orphans.refused(["a"])
    rig.orphans.clear()
    rig.at(5.0)
    assert rig.offered == [] and rig.orphans.take_given_up() == 0
