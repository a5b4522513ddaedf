# SPDX-License-Identifier: Apache-2.0
"""A command to all ranks is answered with the worst of what they say."""

import asyncio
from types import SimpleNamespace

import pytest
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

from banyan.config import Config
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher.all_ranks import around_communicator_call
from banyan.sglang_plugin.prompt_refusals import BadRequest

OK, REFUSED, PLAIN = SimpleNamespace(success=True), SimpleNamespace(success=False), SimpleNamespace()


@pytest.fixture(autouse=True)
def _on(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: Config())


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


def test_answers_when_who_asked_has_gone_then_they_are_not_taken_for_those_to_the_next_command(monkeypatch):
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    sent = []
    communicator = FanOutCommunicator(sent.append, fan_out=2)

    async def ask(obj):
        return await around_communicator_call(FanOutCommunicator.__call__, communicator, obj)

    async def run():
        gone = asyncio.ensure_future(ask("first"))
        await asyncio.sleep(0.01)
        gone.cancel()
        second = asyncio.ensure_future(ask("second"))
        await asyncio.sleep(0.01)
        for name in ("first", "first"):
            communicator.handle_recv(SimpleNamespace(success=True, to=name))
        await asyncio.sleep(0.01)
        assert sent == ["first", "second"]
        for name in ("second", "second"):
            communicator.handle_recv(SimpleNamespace(success=True, to=name))
        return [answer.to for answer in await second]

    assert asyncio.run(run()) == ["second", "second"]


def test_memory_when_a_rank_keeps_it_then_the_command_is_refused_with_its_line():
    gone, stays = ReleaseMemoryOccupationReqOutput(), ReleaseMemoryOccupationReqOutput(rid="it has requests")
    with pytest.raises(BadRequest, match=r"^it has requests$"):
        answered(gone, stays)
