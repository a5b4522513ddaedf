# SPDX-License-Identifier: Apache-2.0
"""An action that Banyan adds is the one that counts, and what the client sent stays."""

import pytest
from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope

from banyan.routing import hint
from banyan.sglang_plugin.kv_hints import payload_of, with_action

OURS = {"action": "move"}


def test_with_action_when_the_client_sent_nothing_then_the_envelope_is_new():
    hints = with_action(None, "banyan.plan", OURS)
    assert (hints.message_id, len(hints.actions)) == ("banyan.plan", 1)
    assert payload_of(hints, "banyan.plan") == {"action": "move"}


def test_with_action_when_the_client_sent_the_same_type_then_ours_counts_and_both_travel():
    theirs = KvHintAction(action_id="a", action_type="banyan.plan", action_version="1", payload={"action": "compute"})
    sent = KvHintsEnvelope(protocol_version="7", message_id="m", actions=[theirs])
    hints = with_action(sent, "banyan.plan", OURS)
    assert (hints.protocol_version, hints.message_id) == ("7", "m")
    assert [action.action_id for action in hints.actions] == ["banyan.plan", "a"]
    assert payload_of(hints, "banyan.plan") == {"action": "move"}
    assert sent.actions == [theirs], "SGLang's own struct is left alone"


@pytest.mark.parametrize("kind", sorted(hint.OWN_ACTIONS))
def test_payload_of_when_a_client_speaks_as_the_server_then_it_does_not_count(kind, monkeypatch):
    assert payload_of(with_action(None, kind, OURS), kind) == OURS
    for forged in ({}, {"server": ""}, {"server": "another"}, {"server": None}):
        theirs = KvHintAction(action_id="a", action_type=kind, action_version="1", payload={"action": "x", **forged})
        hints = KvHintsEnvelope(protocol_version="1", message_id="m", actions=[theirs])
        assert payload_of(hints, kind) is None
        assert payload_of(with_action(hints, kind, OURS), kind) == OURS


def test_payload_of_when_only_another_version_is_there_then_none():
    other = KvHintAction(action_id="a", action_type="banyan.plan", action_version="2", payload=OURS)
    assert payload_of(KvHintsEnvelope(protocol_version="1", message_id="m", actions=[other]), "banyan.plan") is None
    assert payload_of(None, "banyan.plan") is None
