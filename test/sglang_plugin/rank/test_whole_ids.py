# SPDX-License-Identifier: Apache-2.0
"""An abort ends the request that it names, and none that is only called alike."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import AbortReq
from test.sglang_plugin.rank.hooked import hooked
from test.sglang_plugin.rank.test_requests import Req

from banyan.config import Config
from banyan.sglang_plugin import runtime

RIDS = ("a", "a", "ab", "a_0", "a_0b", "a-n1", "a-7", "abcdef", "b", "ba")


@pytest.fixture
def queue(monkeypatch):
    monkeypatch.setattr(runtime, "config", Config)
    return [Req(rid) for rid in RIDS]


def aborted(queue, fails=None, **asked):
    """What ends by SGLang's rule."""
    ended = []

    def abort_request(scheduler, asked):
        ended.extend(req for req in scheduler.queue if asked.abort_all or req.rid.startswith(asked.rid))
        if fails is not None:
            raise fails

    hook = hooked("sglang.srt.managers.scheduler.Scheduler.abort_request", abort_request)
    try:
        hook(SimpleNamespace(queue=queue), AbortReq(**asked))
    finally:
        assert [req.rid for req in queue] == list(RIDS), "each is called as before"
    return [req.rid for req in ended]


def test_abort_when_other_ids_begin_alike_then_they_go_on(queue):
    assert aborted(queue, rid="a") == ["a", "a", "a_0", "a-n1", "a-7"]
    assert aborted(queue, rid="abc") == []
    assert aborted(queue, rid="b") == ["b"]


CREATED = "sglang.srt.managers.scheduler.Scheduler._create_generation_req"
QUEUED = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"


class Come:
    """One of SGLang's that nobody has registered yet."""

    def __init__(self, rid):
        self.rid = rid


@pytest.mark.parametrize("comes", ["created", "queued"])
def test_abort_when_the_rank_shares_nothing_then_others_go_on_all_the_same(monkeypatch, comes):
    monkeypatch.setattr(runtime, "config", lambda: Config(share="off"))
    queue = [Come(rid) for rid in RIDS]
    for req in queue:
        if comes == "created":
            hooked(CREATED, lambda scheduler, req: req)(None, req)
        else:
            hooked(QUEUED, lambda scheduler, req: None)(None, req)
    assert aborted(queue, rid="a") == ["a", "a", "a_0", "a-n1", "a-7"]


def test_abort_when_it_is_of_all_then_all_end(queue):
    assert aborted(queue, abort_all=True) == list(RIDS)


def test_abort_when_sglang_fails_then_it_is_raised_and_each_request_has_its_id(queue):
    with pytest.raises(RuntimeError):
        aborted(queue, RuntimeError("a fault"), rid="a")


def test_abort_when_banyan_is_off_then_it_is_sglangs(queue, monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: None)
    assert aborted(queue, rid="a") == [rid for rid in RIDS if rid.startswith("a")]
