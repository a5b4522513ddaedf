# SPDX-License-Identifier: Apache-2.0
"""Descriptions, health, verdicts, the queue and the settings: no socket, no clock."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import msgspec
import pytest

from banyan import cli
from banyan.router.asked_prompt import Asked
from banyan.router.description import Description, read_loads, together
from banyan.router.fleet import Fleet, Server
from banyan.router.health import Health, Probe, State
from banyan.router.prompt import Request
from banyan.router.settings import Settings
from banyan.router.verdict import Outcome, Tried, WholeEvents, may_retry, retry_after_s
from banyan.router.waiting import Admission, QueueFull, Rate, WaitedTooLong
from banyan.routing import POLICIES, Dispatcher
from banyan.routing.reads import ReadQueue

URL = "http://node7:30000"
EVENTS = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "block_size": 16, "dp_size": 2}


def test_description_when_the_host_is_a_wildcard_then_that_of_the_url():
    found = Description.read({"dp_size": 2, "kv_events": EVENTS | {"replay_endpoint_port_base": 6000}}, URL)
    assert [source.endpoint for source in found.sources] == ["tcp://node7:5557", "tcp://node7:5558"]
    assert [source.replay for source in found.sources] == ["tcp://node7:6000", "tcp://node7:6001"]
    named = Description.read({"dp_size": 2, "kv_events": EVENTS | {"endpoint_host": "10.0.0.9"}}, URL)
    assert named.sources[1].endpoint == "tcp://10.0.0.9:5558" and named.sources[1].replay is None


def test_description_when_there_are_no_events_then_no_sources():
    assert Description.read({"dp_size": 1, "kv_events": None}, URL).sources == ()


@pytest.mark.parametrize(
    ("info", "keeps_more"),
    [
        ({"enable_hierarchical_cache": False, "enable_lmcache": False}, False),
        ({"enable_hierarchical_cache": True}, True),
        ({"enable_lmcache": True}, True),
        ({"internal_states": [{"banyan": {"dp_rank": 0}}]}, True),
    ],
)
def test_description_when_the_server_has_more_than_its_pools_then_it_says_so(info, keeps_more):
    assert Description.read({"dp_size": 1, "kv_events": None} | info, URL).keeps_more is keeps_more


@pytest.mark.parametrize("info", [{}, {"dp_size": "x"}, None, {"dp_size": 1, "kv_events": {"publisher": "zmq"}}])
def test_description_when_it_is_not_sglangs_then_an_error_that_says_so(info):
    with pytest.raises(ValueError, match="server_info"):
        Description.read(info, URL)


def load(rank, timestamp, **fields):
    names = "num_running_reqs num_waiting_reqs num_waiting_uncached_tokens num_used_tokens num_total_tokens"
    return dict.fromkeys(names.split(), 0) | {
        "max_total_num_tokens": 1000, "dp_rank": rank, "timestamp": timestamp, **fields
    }  # fmt: skip


def test_loads_when_the_servers_clock_is_off_then_only_their_age_counts():
    there_s = 50_000.0
    answer = {
        "timestamp": datetime.fromtimestamp(there_s, UTC).isoformat(),
        "loads": [
            load(0, there_s - 2.0, num_running_reqs=3, num_used_tokens=400, read_queue_tokens=32),
            load(1, there_s + 9.0),
        ],
    }
    reports, reads = read_loads(answer, asked_s=7.0)
    assert (reports[0].taken_s, reports[0].num_running) == (5.0, 3)
    assert reports[0].capacity_tokens == 1000
    assert reports[1].taken_s == 7.0 and reads == ReadQueue(32)
    both = together(reports)
    assert (both.taken_s, both.num_running) == (7.0, 3)


HUGE = 10**400


def test_description_when_its_numbers_are_larger_than_any_servers_then_it_is_not_sglangs():
    with pytest.raises(ValueError, match="server_info"):
        Description.read({"dp_size": 1, "kv_events": EVENTS | {"dp_size": 1, "block_size": 1 << 70}}, URL)


@pytest.mark.parametrize("name", ["num_total_tokens", "num_waiting_uncached_tokens", "total_prefill_uncached_tokens"])
def test_loads_when_a_number_is_larger_than_any_servers_then_they_are_not_sglangs(name):
    with pytest.raises(ValueError, match="v1/loads"):
        read_loads({"timestamp": "2026-01-01T00:00:00Z", "loads": [load(0, 0.0, **{name: HUGE})]}, asked_s=7.0)


def test_loads_when_they_are_less_than_none_then_a_place_is_found_all_the_same():
    names = "num_running_reqs num_waiting_reqs num_waiting_uncached_tokens num_used_tokens num_total_tokens"
    less = dict.fromkeys(f"{names} read_queue_tokens total_prefill_uncached_tokens".split(), -5000)
    answer = {
        "timestamp": datetime.fromtimestamp(1.0, UTC).isoformat(),
        "loads": [load(n, 1.0, **less) for n in (0, 1)],
    }
    (server,) = servers = [Server("http://a", Health(3))]
    fleet = Fleet(servers, Dispatcher(0, POLICIES["lmetric"]()), max_in_flight=2, clock=lambda: 10.0)
    fleet.described(server, Description(num_ranks=2))
    server.health.came_up()
    fleet.reported(server, *read_loads(answer, 7.0))
    assert fleet.take(Asked(Request(text=b"hello"))) is not None
    assert all(
        number >= 0
        for one in server.loads.values()
        for number in msgspec.structs.astuple(one)[3:]
        if number is not None
    )


@pytest.mark.parametrize("rate", [1e308, -1.0, 0, None])
def test_loads_when_the_rate_of_reads_is_none_then_it_is_not_known(rate):
    answer = {"timestamp": "2026-01-01T00:00:00Z", "loads": [load(0, 0.0, read_tokens_per_s=rate)]}
    assert read_loads(answer, asked_s=7.0)[1].tokens_per_s is None


def test_health_when_probes_fail_in_a_row_then_down_and_only_then():
    health = Health(3)
    assert health.state is State.STARTING and not health.failed(Probe.LOAD, "x")
    health.came_up()
    assert [health.failed(Probe.LOAD, "x") for _ in range(2)] == [False, False]
    health.passed(Probe.LOAD)
    assert [health.failed(probe, "x") for probe in (Probe.LOAD, Probe.LOAD, Probe.ENGINE)] == [False] * 3
    assert health.state is State.UP
    assert health.failed(Probe.LOAD, "x") and health.state is State.DOWN


def test_health_when_nobody_listens_then_down_at_once_but_a_start_is_no_fall():
    health = Health(3)
    health.refused("x")
    assert health.state is State.STARTING
    health.came_up()
    health.refused("x")
    assert health.state is State.DOWN


def test_retry_when_servers_were_not_reached_then_it_is_free_and_otherwise_counted():
    unreached, lost = (Tried(URL, outcome, "x") for outcome in (Outcome.UNREACHED, Outcome.LOST))
    assert may_retry([unreached] * 3, max_retries=0, num_servers=3)
    assert not may_retry([unreached] * 4, max_retries=0, num_servers=3)
    assert not may_retry([lost], max_retries=0, num_servers=3)
    assert may_retry([unreached, lost], max_retries=1, num_servers=3)
    assert not may_retry([lost, lost], max_retries=1, num_servers=3)
    refused = Tried("a", Outcome.REFUSED, "full")
    assert may_retry([lost, refused, refused], max_retries=1, num_servers=3, free={Outcome.REFUSED})
    assert not may_retry([unreached, unreached], max_retries=1, num_servers=3, free=set())
    assert not may_retry([lost, refused], max_retries=1, num_servers=3)


def test_retry_after_when_the_queue_moves_then_its_length_over_its_speed():
    assert [retry_after_s(*args) for args in ((0, 0.0), (5, 0.0), (5, 2.0), (1000, 0.1))] == [1, 60, 3, 60]


@pytest.mark.parametrize("mark", [b"\n\n", b"\r\n\r\n"])
def test_events_when_cut_anywhere_then_only_whole_ones_are_passed_on(mark):
    stream = mark.join((b"data: one", b"data: two", b"data: rest"))
    for cut in range(len(stream)):
        events = WholeEvents()
        passed = [events.feed(stream[:cut]), events.feed(stream[cut:])]
        assert all(not part or part.endswith(mark) for part in passed)
        assert b"".join(passed) == stream[: -len(b"data: rest")]
        assert events.close() == b"data: rest"


def scripted(places):
    """A ``take`` that gives what is in the list, None while it is empty."""
    return lambda: places.pop(0) if places else None


def test_queue_when_places_come_then_first_come_first_served():
    async def scenario():
        places, given_back = [], []
        queue = Admission(2, given_back.append)
        order = []

        async def enter(name):
            order.append((name, await queue.enter(scripted(places), 5.0)))

        first, second = asyncio.create_task(enter("first")), asyncio.create_task(enter("second"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await queue.enter(scripted(places), 5.0)
        places += ["A", "B"]
        queue.wake()
        await asyncio.gather(first, second)
        assert order == [("first", "A"), ("second", "B")] and not given_back

    asyncio.run(scenario())


def test_queue_when_someone_waits_then_nobody_overtakes():
    async def scenario():
        places = []
        queue = Admission(5, places.append)
        first = asyncio.create_task(queue.enter(scripted(places), 5.0))
        await asyncio.sleep(0)
        places.append("A")
        late = asyncio.create_task(queue.enter(scripted(places), 0.01))
        await asyncio.sleep(0)
        queue.wake()
        assert await first == "A"
        with pytest.raises(WaitedTooLong):
            await late
        assert queue.num_waiting == 0

    asyncio.run(scenario())


def test_queue_when_the_client_goes_as_its_turn_comes_then_the_place_is_given_back():
    async def scenario():
        places, given_back = [], []
        queue = Admission(5, given_back.append)
        waiting = asyncio.create_task(queue.enter(scripted(places), 5.0))
        await asyncio.sleep(0)
        places.append("A")
        queue.wake()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert given_back == ["A"] and queue.num_waiting == 0

    asyncio.run(scenario())


def test_rate_when_time_passes_then_old_events_do_not_count():
    now_s = [0.0]
    rate = Rate(lambda: now_s[0])
    for now_s[0] in (0.0, 5.0, 9.0):
        rate.happened()
    assert rate.per_s() == 0.3
    now_s[0] = 12.0
    assert rate.per_s() == 0.2


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"servers": ()}, "--server"),
        ({"servers": ("node:30000",)}, "--server"),
        ({"servers": ("ftp://a:1",)}, "--server"),
        ({"servers": (URL, URL)}, "--server"),
        ({"servers": ("http://localhost:30000", "http://127.0.0.1:30000")}, "twice"),
        ({"servers": ("http://Node7:30000", "http://node7.:30000")}, "twice"),
        ({"servers": (), "prefills": ("http://a",), "decodes": ("http://a:80",)}, "twice"),
        *(({"servers": (f"http://{wrong}",)}, "--server") for wrong in ("me:key@a:1", "@a:1", "a:1/x", "a:1?", "a:1#")),
        *(({"servers": (f"http://{wrong}",)}, "--server") for wrong in ("a:x", "a:99999", "[::1", ":1", "", "a:1\n")),
        ({"policy": "best"}, "--policy"),
        ({"max_in_flight": 0}, "--max-in-flight"),
        ({"hot_rank_factor": 0.5}, "--hot-rank-factor"),
        ({"max_body_mib": 0}, "--max-body-mib"),
        ({"queue_timeout_s": 0.0}, "--queue-timeout-s"),
    ],
)
def test_settings_when_out_of_range_then_the_error_names_the_flag(values, flag):
    with pytest.raises(ValueError, match=flag):
        Settings(**({"servers": (URL,)} | values))


def test_route_when_a_flag_is_wrong_then_exit_2_and_one_line(capsys):
    assert cli.main(["route", "--server", "nonsense"]) == 2
    assert capsys.readouterr().err.startswith("banyan route: --server nonsense")


@pytest.mark.parametrize("info", [{"dp_size": 10**9}, {"dp_size": 1, "kv_events": EVENTS | {"dp_size": 10**9}}])
def test_description_when_it_names_more_ranks_than_a_server_has_then_it_is_none(info):
    with pytest.raises(ValueError, match="1000000000 ranks, at most 1024"):
        Description.read(info, URL)
