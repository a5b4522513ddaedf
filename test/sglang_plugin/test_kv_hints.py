# SPDX-License-Identifier: Apache-2.0
"""An action that Banyan adds is the one that counts, and what the client sent stays."""

from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope

from banyan.sglang_plugin.kv_hints import payload_of, with_action

OURS = {"action_id": "ours", "action_type": "banyan.plan", "action_version": "1", "payload": {"action": "move"}}


def test_with_action_when_the_client_sent_nothing_then_the_envelope_is_new():
    hints = with_action(None, **OURS)
    assert (hints.message_id, len(hints.actions)) == ("ours", 1)
    assert payload_of(hints, "banyan.plan", "1") == {"action": "move"}


def test_with_action_when_the_client_sent_the_same_type_then_ours_counts_and_both_travel():
    theirs = KvHintAction(action_id="a", action_type="banyan.plan", action_version="1", payload={"action": "compute"})
    sent = KvHintsEnvelope(protocol_version="7", message_id="m", actions=[theirs])
    hints = with_action(sent, **OURS)
    assert (hints.protocol_version, hints.message_id) == ("7", "m")
    assert [action.action_id for action in hints.actions] == ["ours", "a"]
    assert payload_of(hints, "banyan.plan", "1") == {"action": "move"}
    assert sent.actions == [theirs], "SGLang's own struct is left alone"


def test_payload_of_when_only_another_version_is_there_then_none():
    assert payload_of(with_action(None, **{**OURS, "action_version": "2"}), "banyan.plan", "1") is None
    assert payload_of(None, "banyan.plan", "1") is None
