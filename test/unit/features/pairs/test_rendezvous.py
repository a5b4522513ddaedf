# SPDX-License-Identifier: Apache-2.0
"""Rooms, and answers that are none."""

import json

import pytest

from banyan.features.pairs import rendezvous
from banyan.features.pairs.rendezvous import ROOM_BITS, Rendezvous, address, broken_with, choose_room

RENDEZVOUS = Rendezvous("10.0.0.1", 8998, 77)
FIELDS = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 77}


@pytest.mark.parametrize("body", [b'{"text": "hi {}"}', b' { "text" : "}" } \n', b"{}", b"{ }"])
def test_address_when_the_body_is_an_object_then_the_rendezvous_is_in_it(body):
    assert json.loads(address(body, RENDEZVOUS)) == json.loads(body) | FIELDS


def test_address_when_the_client_named_a_room_then_it_is_replaced():
    assert json.loads(address(b'{"bootstrap_room": 5}', RENDEZVOUS))["bootstrap_room"] == 77


@pytest.mark.parametrize("body", [b"", b"not json"])
def test_address_when_the_body_is_no_object_then_it_is_left_to_the_servers(body):
    assert address(body, RENDEZVOUS) == body


@pytest.mark.parametrize("bits", [0, 1, 5, (1 << ROOM_BITS) - 1, 1 << 70])
def test_room_when_a_rank_is_wanted_then_the_room_leads_there_and_is_never_zero(bits):
    for num_ranks in (1, 2, 3, 8):
        for rank in range(num_ranks):
            room = choose_room(bits, num_ranks=num_ranks, rank=rank)
            assert room % num_ranks == rank
            assert 0 < room < 1 << 63
    assert 0 < choose_room(bits, num_ranks=4, rank=None) < 1 << 63


def event(body):
    return b"data: " + json.dumps(body).encode() + b"\n\ndata: [DONE]\n\n"


ABORT = {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "m", "status_code": 500}}}
REFUSAL = {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "m", "status_code": 400}}}


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (event(ABORT), ABORT["meta_info"]["finish_reason"]["status_code"]),
        (event({"error": {"message": "m", "code": 503}}), 503),
        (event(REFUSAL), 0),
        (event({"error": {"message": "m", "code": 400}}), 0),
        (event({"text": "a", "meta_info": {"finish_reason": None}}), 0),
        (event({"meta_info": {"finish_reason": {"type": "abort", "message": "by the client"}}}), 0),
        (event(["a list"]), 0),
        (b": ping\n\n", 0),
        (b"", 0),
    ],
)
def test_stream_when_its_first_event_is_a_server_error_then_it_is_broken(first, status):
    assert broken_with(200, first, is_stream=True) == status


def test_stream_when_its_first_event_is_of_megabytes_then_nobody_waits_while_it_is_read(monkeypatch):
    monkeypatch.setattr(rendezvous.json, "loads", lambda event: pytest.fail("it was read"))
    assert broken_with(200, event(ABORT | {"logprobs": [0.5] * 100_000}), is_stream=True) == 0


def test_answer_when_its_status_is_a_server_error_then_it_is_broken():
    assert [broken_with(status, b"", is_stream=False) for status in (200, 400, 422, 500, 503)] == [0, 0, 0, 500, 503]
