# SPDX-License-Identifier: Apache-2.0
"""A command to all ranks is answered with the worst of what they say."""

import asyncio
from types import SimpleNamespace

import pytest

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher.all_ranks import around_communicator_call

OK, REFUSED, PLAIN = SimpleNamespace(success=True), SimpleNamespace(success=False), SimpleNamespace()


def answered(*answers):
    async def original(communicator, obj):
        assert (communicator, obj) == ("communicator", "flush")
        return list(answers)

    return asyncio.run(around_communicator_call(original, "communicator", "flush"))


@pytest.mark.parametrize(
    ("answers", "worst_first"),
    [
        ([OK, REFUSED], [REFUSED, OK]),
        ([PLAIN, REFUSED, OK], [REFUSED, PLAIN, OK]),
        ([OK, PLAIN], [OK, PLAIN]),
        ([PLAIN, OK], [PLAIN, OK]),
    ],
)
def test_answers_when_a_rank_refuses_then_it_comes_first_and_one_that_says_neither_has_not_refused(
    monkeypatch, answers, worst_first
):
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    assert answered(*answers) == worst_first


def test_answers_when_nothing_is_shared_then_they_stay_in_sglangs_order(monkeypatch):
    monkeypatch.setattr(runtime, "is_sharing", lambda: False)
    assert answered(OK, REFUSED) == [OK, REFUSED]
