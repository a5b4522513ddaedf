# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from banyan.core import Address
from banyan.routing.hint import Decision, PrefixHint, ReadHint, SourceHint

DECISION = Decision(policy="lmetric", reason="load", num_hot_ranks=1, dispatch_us=60)


@pytest.mark.parametrize(
    ("tokens_by_rank", "expected"),
    [([], PrefixHint(0, -1)), ([0, 0], PrefixHint(0, -1)), ([48, 112, 112], PrefixHint(112, 1))],
)
def test_hint_when_ranks_hold_prefixes_then_the_longest_and_its_first_holder(tokens_by_rank, expected):
    assert PrefixHint.from_tokens_by_rank(tokens_by_rank) == expected


@pytest.mark.parametrize("decision", [None, DECISION])
def test_payload_when_it_crosses_a_process_border_then_it_is_read_back(decision):
    seen = PrefixHint(160, 3, decision)
    assert PrefixHint.from_payload(json.loads(json.dumps(seen.payload()))) == seen


@pytest.mark.parametrize(
    "payload", [{}, {"dp_max_kv_len": "1", "dp_max_kv_rank": 0}, {"dp_max_kv_len": -1, "dp_max_kv_rank": 0}]
)
def test_payload_when_it_is_not_ours_then_none(payload):
    assert PrefixHint.from_payload(payload) is None


@pytest.mark.parametrize("broken", [{"reason": 3}, {"reason": "nonsense"}, {"dispatch_us": "soon"}])
def test_payload_when_only_the_decision_is_broken_then_the_rest_is_read(broken):
    payload = PrefixHint(160, 3, DECISION).payload() | broken
    assert PrefixHint.from_payload(payload) == PrefixHint(160, 3)


def test_read_hint_when_it_travels_as_text_then_it_is_read_back():
    reads = ReadHint("[::1]:7400", 992)
    assert ReadHint.read(reads.text()) == reads


@pytest.mark.parametrize(
    "text", ["", "x", "a:1 -5", "a:1 ", " 5", "a:1 5 6", "a:1 ٣", "a:1 1e3", "a:1 " + "9" * 5000, None, 1, ["a:1 5"]]
)
def test_read_hint_when_a_text_is_not_ours_then_none(text):
    assert ReadHint.read(text) is None


@pytest.mark.parametrize("page_servers", [(), (Address("::1", 7400),), (Address("a", 1), Address("b", 2))])
def test_source_hint_when_it_travels_as_text_then_it_is_read_back(page_servers):
    source = SourceHint(page_servers)
    assert SourceHint.read(source.text()) == source


@pytest.mark.parametrize(
    "text", ["", "a", "a:1,", ",a:1", "a:x", "a:1,none", "None", ",".join(["a:1"] * 2000), None, 1, ["a:1"]]
)
def test_source_hint_when_a_text_is_not_ours_then_none(text):
    assert SourceHint.read(text) is None
