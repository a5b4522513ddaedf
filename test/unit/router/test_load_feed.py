# SPDX-License-Identifier: Apache-2.0
"""Loads that ranks publish: the wire, and what a router makes of them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from test.unit.router.fake_server import FakeServer, running

from banyan.router.description import MOST
from banyan.router.load_feed import read_load
from banyan.routing import LoadReport

WIRE = ["LoadStat", 3, 2, 1000, 4096, 0, 500, 1700, 64, 9000, 8_000_000]


def test_read_when_it_is_as_sglang_sends_it_then_a_report():
    assert read_load(msgspec.msgpack.encode(WIRE), 5.0) == LoadReport(
        taken_s=5.0,
        num_running=3,
        num_waiting=2,
        pending_prefill_tokens=500,
        ongoing_tokens=1700,
        capacity_tokens=4096,
        total_prefill_tokens=9000,
        total_prefill_us=8_000_000,
    )


def test_read_when_numbers_are_less_than_none_then_none():
    report = read_load(msgspec.msgpack.encode(["LoadStat", *[-5] * 10]), 5.0)
    assert report == LoadReport(taken_s=5.0)


def test_read_when_sglang_has_added_fields_then_they_are_passed_over():
    assert read_load(msgspec.msgpack.encode([*WIRE, 1, "new"]), 5.0) == read_load(msgspec.msgpack.encode(WIRE), 5.0)


HUGE = ["LoadStat", 3, 2, 1000, MOST + 1, 0]


@pytest.mark.parametrize("payload", [b"", b"\xff", msgspec.msgpack.encode(["Other", *WIRE[1:]]), WIRE[:3], HUGE])
def test_read_when_it_is_no_load_then_said(payload):
    with pytest.raises(msgspec.DecodeError):
        read_load(msgspec.msgpack.encode(payload) if isinstance(payload, list) else payload, 5.0)


def test_request_when_a_server_publishes_its_load_then_the_other_one_gets_it_before_anybody_has_asked():
    async def main():
        busy, idle = FakeServer("busy", loads=True), FakeServer("idle", loads=True)
        # What they would answer themselves is that they are idle.
        busy.loads_status = idle.loads_status = 404
        async with running([busy, idle], policy="lmetric") as rig:
            (target,), (publisher,) = rig.router.fleet.servers[0].targets, busy.publishers

            def load():
                return rig.router.fleet._dispatcher.states({target.number})[0]

            await publisher.tell_load(b"no load")
            while not load().num_requests:
                # Who subscribes late has missed what was sent before.
                await publisher.tell_load(msgspec.msgpack.encode(WIRE))
                await asyncio.sleep(0.005)
            assert load().pending_prefill_tokens == 500
            assert b"published_loads" in (await rig.get("/metrics"))[1]
            await rig.ask(text="who is free?")
            assert rig.num_seen() == [0, 1]

    asyncio.run(main())
