# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from types import SimpleNamespace

import pytest

from banyan.features.stores.known import DOUBT_S, Known

HERE, ELSEWHERE = b"n" * 32, b"m" * 32


@pytest.fixture
def time() -> SimpleNamespace:
    return SimpleNamespace(now_s=0.0)


@pytest.fixture
def known(time: SimpleNamespace) -> Known:
    return Known(HERE, lambda: time.now_s, max_known=3)


def test_known_when_pages_are_added_then_the_leading_ones_and_another_version(known: Known) -> None:
    before = known.version
    known.add(["a", "b", "d"], HERE)
    assert known.num_leading(["a", "b", "c", "d"], HERE) == 2 and known.version != before


def test_known_when_full_then_the_least_wanted_goes(known: Known) -> None:
    known.add(["a", "b", "c"], HERE)
    known.num_leading(["a"], HERE)
    known.add(["d"], HERE)
    assert len(known) == 3
    assert known.num_leading(["a"], HERE) == 1 and known.num_leading(["b"], HERE) == 0


def test_known_when_a_page_has_failed_then_not_expected_for_a_while(known: Known, time: SimpleNamespace) -> None:
    known.add(["a", "b"], HERE)
    known.doubt(["a"], HERE)
    known.add(["a"], HERE)
    assert known.num_leading(["a", "b"], HERE) == 0
    time.now_s = DOUBT_S
    known.add(["a"], HERE)
    assert known.num_leading(["a", "b"], HERE) == 2


def test_known_when_a_page_that_failed_was_written_then_expected_again(known: Known) -> None:
    known.doubt(["a"], HERE)
    known.wrote(["a"], HERE)
    assert known.num_leading(["a"], HERE) == 1


def test_known_when_another_namespace_begins_then_nothing_of_the_old_one_is_heard(known: Known) -> None:
    known.add(["a"], HERE)
    known.begin(ELSEWHERE)
    known.add(["b"], HERE)
    known.doubt(["c"], HERE)
    known.add(["c"], ELSEWHERE)
    assert known.num_leading(["a"], HERE) == 0 and known.num_leading(["b"], ELSEWHERE) == 0
    assert known.num_leading(["c"], ELSEWHERE) == 1


def test_known_when_pages_were_removed_then_forgotten_without_doubt(known: Known) -> None:
    known.add(["a"], HERE)
    known.forget(["a"])
    assert known.num_leading(["a"], HERE) == 0
    known.add(["a"], HERE)
    assert known.num_leading(["a"], HERE) == 1
