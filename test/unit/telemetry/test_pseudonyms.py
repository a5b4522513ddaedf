# SPDX-License-Identifier: Apache-2.0
"""What a rank tells of requests and pages belongs to nobody who reads it."""

import hashlib
import json

from banyan.telemetry import Pseudonyms, rid_pseudonym

RID = "7c9e6679f7144bd0a1b2c3d4e5f60718"
KEYS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(3)]
STATE = {
    "dp_rank": 1,
    "plans": [{"rid": RID, "reason": "expected to be faster"}, {"rid": "\ud800", "reason": ""}],
    "prompts": [{"rid": RID, "num_turns": 2, "marks": [[16, KEYS[0]], [32, KEYS[1]]]}],
    "dropped": [{"key": KEYS[1], "num_pages": 3}, {"key": KEYS[2], "num_pages": 1}],
}


def test_state_when_it_is_told_then_no_id_and_no_part_of_a_key_leaves():
    text = json.dumps(Pseudonyms("secret").told(STATE))
    for name in (RID, *KEYS):
        assert not any(name[place : place + 8] in text for place in range(len(name) - 8))
    assert "secret" not in text


def test_state_when_it_is_told_then_the_rest_is_as_it_was_and_equal_names_are_equal():
    told = Pseudonyms("secret").told(STATE)
    assert told["dp_rank"] == 1 and told["plans"][0]["reason"] == "expected to be faster"
    assert told["plans"][0]["rid"] == told["prompts"][0]["rid"] == rid_pseudonym(told["rid_nonce"], RID)
    (_, (num_tokens, key)), last = told["prompts"][0]["marks"], told["dropped"][0]
    assert num_tokens == 32 and key == last["key"] and last["num_pages"] == 3
    assert told["dropped"][1]["key"] != key


def test_pseudonyms_when_the_server_is_another_then_so_are_they():
    one, other = Pseudonyms("one"), Pseudonyms("other")
    assert one.of_key(KEYS[0]) != other.of_key(KEYS[0])
    assert rid_pseudonym(one.nonce, RID) != rid_pseudonym(other.nonce, RID)


def test_pseudonyms_of_keys_when_the_nonce_is_known_then_they_do_not_follow_from_it():
    names = Pseudonyms("secret")
    digests = (hashlib.blake2b(KEYS[0].encode(), key=bytes.fromhex(names.nonce), digest_size=size) for size in (6, 8))
    assert names.of_key(KEYS[0]) not in [digest.hexdigest()[:12] for digest in digests]
