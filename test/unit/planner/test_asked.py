# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.planner import Action, asked


@pytest.mark.parametrize("action", list(Action))
def test_payload_when_it_crosses_a_process_border_then_it_is_read_back(action):
    assert asked.from_payload(asked.payload(action)) is action


@pytest.mark.parametrize("payload", [{}, {"action": "fly"}, {"action": 3}])
def test_payload_when_it_is_not_ours_then_none(payload):
    assert asked.from_payload(payload) is None
