# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from banyan.pacing import ForwardShape, ForwardSlack, LayerTimes, SlackTable

US = 1000
SHAPE = ForwardShape(100, 0)


@pytest.fixture
def slack():
    return ForwardSlack(LayerTimes(SlackTable((100,), (0,), ((500.0,),))), num_layers=4)


def test_slack_when_idle_then_unlimited(slack):
    assert slack.is_idle
    assert slack.layer_slack_us(0) == slack.forward_slack_us(0) == math.inf


def test_slack_when_a_layer_runs_then_what_it_still_needs(slack):
    slack.begin(SHAPE, 0)
    slack.reach(1, 700 * US)
    assert slack.layer_slack_us(900 * US) == 300.0
    assert slack.forward_slack_us(900 * US) == 300.0 + 2 * 500.0


def test_slack_when_the_last_layer_overruns_then_none_is_left(slack):
    slack.begin(SHAPE, 0)
    slack.reach(3, 0)
    assert slack.layer_slack_us(800 * US) == slack.forward_slack_us(800 * US) == 0.0


def test_slack_when_a_dummy_forward_ticks_then_still_idle(slack):
    slack.reach(2, 0)
    assert slack.is_idle
    slack.begin(SHAPE, 0)
    slack.end()
    assert slack.is_idle


def test_slack_when_a_forward_never_ended_then_the_next_replaces_it(slack):
    slack.begin(SHAPE, 0)
    slack.reach(3, 0)
    slack.begin(SHAPE, 1000 * US)
    assert slack.forward_slack_us(1000 * US) == 2000.0
