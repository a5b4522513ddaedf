# SPDX-License-Identifier: Apache-2.0
"""Guesses from what was sent."""

from __future__ import annotations

from banyan.routing import sent as sent_module
from banyan.routing.sent import PIECE_BYTES, PIECE_TOKENS, SentPieces, piece_ids


def pieces(text, namespace=b""):
    return list(piece_ids(text, namespace))


def test_leading_when_a_prompt_grows_then_what_was_sent_of_it():
    sent = SentPieces()
    sent.sent(pieces(b"x" * (3 * PIECE_BYTES + 7)))
    assert sent.leading_tokens(pieces(b"x" * (9 * PIECE_BYTES))) == 3 * PIECE_TOKENS
    assert sent.leading_tokens(pieces(b"y" + b"x" * (3 * PIECE_BYTES))) == 0


def test_leading_when_the_namespace_differs_then_nothing():
    sent = SentPieces()
    sent.sent(pieces(b"x" * PIECE_BYTES, b"salt"))
    assert sent.leading_tokens(pieces(b"x" * PIECE_BYTES)) == 0
    assert sent.leading_tokens(pieces(b"x" * PIECE_BYTES, b"salt")) == PIECE_TOKENS


def test_sent_when_there_is_no_more_room_then_the_oldest_goes_and_fronts_go_last():
    sent = SentPieces(capacity_tokens=3 * PIECE_TOKENS)
    old, new = pieces(b"o" * (2 * PIECE_BYTES)), pieces(b"n" * (2 * PIECE_BYTES))
    sent.sent(old)
    sent.sent(new)
    assert len(sent) == 3
    assert sent.leading_tokens(old) == PIECE_TOKENS
    assert sent.leading_tokens(new) == 2 * PIECE_TOKENS


def test_sent_when_a_target_says_that_it_has_room_for_anything_then_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(sent_module, "MOST_TOKENS", 4 * PIECE_TOKENS)
    sent = SentPieces()
    sent.has_room_for(1 << 53)
    sent.sent(pieces(b"x" * (9 * PIECE_BYTES)))
    assert len(sent) == 4
