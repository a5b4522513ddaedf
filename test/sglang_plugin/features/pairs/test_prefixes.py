# SPDX-License-Identifier: Apache-2.0
"""A prefill server whose decode server says that it has more than the prompt. SGLang's own sender and tables."""

from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from test.sglang_plugin.features.pairs.test_hand_over import ROOM, asks, engine, manager, sender_of  # noqa: F401

from banyan.features.pairs.rank import prefixes


@pytest.mark.parametrize(("num_said", "fails"), [(0, False), (20, False), (21, True), (1 << 30, True)])
def test_request_when_its_decode_server_has_more_than_the_prompt_then_it_is_given_up_on_both_sides(
    manager,  # noqa: F811
    num_said,
    fails,
):
    sender = sender_of(manager)
    asks(manager)
    manager.req_to_decode_prefix_len = {ROOM: num_said}
    req = SimpleNamespace(disagg_kv_sender=sender, origin_input_ids=[1] * 20)
    prefixes.before_finalize_bootstrap(None, req)
    assert sender.pop_decode_prefix_len() == (0 if fails else num_said)
    assert (sender.poll() == KVPoll.Failed) is fails
    assert [said["status"] for said in manager.told] == [KVPoll.Failed] * fails


def test_request_when_its_sender_is_of_sglangs_health_checks_then_it_is_left_alone():
    prefixes.before_finalize_bootstrap(None, SimpleNamespace(disagg_kv_sender=object()))
