# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from types import SimpleNamespace

import pytest

from banyan.features.stores.presence_cache import DOUBT_S, KNOWN_S, PresenceCache

HERE, ELSEWHERE = b"n" * 32, b"m" * 32


@pytest.fixture
def time() -> SimpleNamespace:
    return SimpleNamespace(now_s=0.0)


@pytest.fixture
def presence(time: SimpleNamespace) -> PresenceCache:
    return PresenceCache(HERE, lambda: time.now_s, max_pages=3)


def test_presence_when_pages_are_added_then_the_leading_ones_and_another_version(presence: PresenceCache) -> None:
    before = presence.version
    presence.add(["a", "b", "d"], HERE)
    assert presence.num_leading(["a", "b", "c", "d"], HERE) == 2 and presence.version != before


def test_presence_when_full_then_the_least_wanted_goes(presence: PresenceCache) -> None:
    presence.add(["a", "b", "c"], HERE)
    presence.num_leading(["a"], HERE)
    presence.add(["d"], HERE)
    assert len(presence) == 3
    assert presence.num_leading(["a"], HERE) == 1 and presence.num_leading(["b"], HERE) == 0


def test_presence_when_a_page_has_failed_then_not_expected_for_a_while(
    presence: PresenceCache, time: SimpleNamespace
) -> None:
    presence.add(["a", "b"], HERE)
    presence.doubt(["a"], HERE)
    presence.add(["a"], HERE)
    assert presence.num_leading(["a", "b"], HERE) == 0
    time.now_s = DOUBT_S
    presence.add(["a"], HERE)
    assert presence.num_leading(["a", "b"], HERE) == 2


def test_presence_when_it_was_said_long_ago_then_asked_again(presence: PresenceCache, time: SimpleNamespace) -> None:
    presence.add(["a"], HERE)
    time.now_s = KNOWN_S - 1
    presence.wrote(["b"], HERE)
    assert presence.num_leading(["a", "b"], HERE) == 2
    time.now_s = KNOWN_S
    assert presence.num_leading(["a", "b"], HERE) == 0 and presence.num_leading(["b"], HERE) == 1
    presence.add(["a"], HERE)
    assert presence.num_leading(["a", "b"], HERE) == 2


def test_presence_when_a_page_that_failed_was_written_then_expected_again(presence: PresenceCache) -> None:
    presence.doubt(["a"], HERE)
    presence.wrote(["a"], HERE)
    assert presence.num_leading(["a"], HERE) == 1


def test_presence_when_another_namespace_begins_then_nothing_of_the_old_one_is_heard(presence: PresenceCache) -> None:
    presence.add(["a"], HERE)
    presence.begin(ELSEWHERE)
    presence.add(["b"], HERE)
    presence.doubt(["c"], HERE)
    presence.add(["c"], ELSEWHERE)
    assert presence.num_leading(["a"], HERE) == 0 and presence.num_leading(["b"], ELSEWHERE) == 0
    assert presence.num_leading(["c"], ELSEWHERE) == 1


def test_presence_when_pages_were_removed_then_forgotten_without_doubt(presence: PresenceCache) -> None:
    presence.add(["a"], HERE)
    presence.clear()
    assert presence.num_leading(["a"], HERE) == 0
    presence.add(["a"], HERE)
    assert presence.num_leading(["a"], HERE) == 1
