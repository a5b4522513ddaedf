# SPDX-License-Identifier: Apache-2.0
"""A rank that stands still is told once, and once when it is heard again."""

import logging

import pytest

from banyan.routing import Dispatcher
from banyan.routing.dispatcher import Prompt
from banyan.routing.load import LoadReport
from banyan.routing.policies import LMetric
from banyan.sglang_plugin.dispatcher.rank_watchdog import LOOK_PERIOD_S, SILENCE_S, RankWatchdog


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.WARNING, "banyan")
    return lambda: [record.getMessage() for record in caplog.records]


def test_rank_when_it_reports_nothing_of_what_it_was_sent_then_it_is_told_once_until_it_is_heard(told):
    dispatcher, silent = Dispatcher(2, LMetric()), []
    watchdog = RankWatchdog(dispatcher.unheard_s, silent.append)
    dispatcher.count(Prompt(10), 0, 100.0)
    dispatcher.count(Prompt(10), 1, 100.0)
    dispatcher.reported(0, LoadReport(taken_s=101.0, num_running=1))
    watchdog.look(100.0 + SILENCE_S - 1)
    assert told() == []
    for later in range(5):
        watchdog.look(100.0 + SILENCE_S + later)
    assert silent == [{1}]
    (line,) = told()
    assert "rank 1 has requests and has not reported" in line
    dispatcher.reported(1, LoadReport(taken_s=150.0))
    watchdog.look(151.0)
    assert silent == [{1}, set()]
    assert told()[1:] == ["banyan: rank 1 reports again, or SGLang has taken it out"]


def test_rank_when_it_has_nothing_to_do_then_its_silence_is_none(told):
    dispatcher, silent = Dispatcher(2, LMetric()), []
    watchdog = RankWatchdog(dispatcher.unheard_s, silent.append)
    dispatcher.count(Prompt(10), 0, 100.0)
    dispatcher.reported(0, LoadReport(taken_s=101.0))
    watchdog.look(100_000.0)
    assert (silent, told()) == ([], [])


def test_ranks_when_they_were_just_looked_at_then_they_are_left_alone():
    looks = []
    watchdog = RankWatchdog(lambda now_s: looks.append(now_s) or {}, lambda silent: None)
    for now_s in (10.0, 10.0 + LOOK_PERIOD_S / 2, 10.0 + LOOK_PERIOD_S):
        watchdog.look(now_s)
    assert looks == [10.0, 10.0 + LOOK_PERIOD_S]
