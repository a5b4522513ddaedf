# SPDX-License-Identifier: Apache-2.0
"""Requests that are drawn, and how what they did is read from a log."""

import json
import random

from benchmark import http_fuzz
from benchmark.drawn_requests import FIELDS, LIMITS, bounded, request
from benchmark.http_fuzz import PACKAGE, batches, own_tracebacks

PROMPT = list(range(3, 203))


def bodies(numbers):
    for number in numbers:
        try:
            yield json.loads(request(random.Random(number), PROMPT).body)
        except ValueError:
            continue  # Cut, or with bytes that are no text.


def test_requests_when_drawn_by_the_same_number_then_they_are_the_same():
    assert request(random.Random(7), PROMPT) == request(random.Random(7), PROMPT)
    assert len({request(random.Random(number), PROMPT).body for number in range(100)}) > 90


def test_requests_when_many_are_drawn_then_all_endpoints_and_fields_come():
    drawn = [request(random.Random(number), PROMPT) for number in range(3000)]
    assert {one.path for one in drawn} == {"/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"}
    named = b" ".join(one.body for one in drawn).decode(errors="replace")
    assert [field for field in FIELDS if f'"{field}"' not in named] == []
    assert {name.lower() for one in drawn for name in one.headers} >= {"x-banyan-node", "x-smg-routing-key"}


def test_numbers_when_they_would_keep_a_server_busy_then_they_are_bounded_at_any_depth():
    asked = {"n": 2**63, "a": [{"max_new_tokens": 1e308, "n": True}], "sampling_params": {"n": 2, "max_tokens": -5}}
    assert bounded(asked) == {
        "n": LIMITS["n"],
        "a": [{"max_new_tokens": LIMITS["max_new_tokens"], "n": True}],
        "sampling_params": {"n": 2, "max_tokens": -5},
    }
    assert all(not isinstance(body, dict) or body == bounded(body) for body in bodies(range(300)))


TRACEBACK = """Traceback (most recent call last):
  File "{package}launcher/rerun.py", line 40, in around
    await original()
  File "{last}", line 7, in last
    fail()
ValueError: no
"""


def test_traceback_when_its_last_frame_is_banyans_then_it_is_told():
    own = TRACEBACK.format(package=PACKAGE, last=f"{PACKAGE}rank/hooks.py")
    sglangs = TRACEBACK.format(package=PACKAGE, last="/somewhere/sglang/srt/x.py")
    assert own_tracebacks(f"fine\n{sglangs}fine") == []
    assert own_tracebacks(f"{own}fine\n{sglangs}{own}") == ["2 tracebacks end in rank/hooks.py:7 last"]


def test_batches_when_a_number_of_requests_is_given_then_they_are_exactly_these():
    assert [number for batch in batches(10, 2 * http_fuzz.BATCH + 5, 0.0) for number in batch] == list(
        range(10, 10 + 2 * http_fuzz.BATCH + 5)
    )


def test_batches_when_there_is_no_time_then_there_are_none():
    assert list(batches(0, None, 0.0)) == []
