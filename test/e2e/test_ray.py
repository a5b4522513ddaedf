# SPDX-License-Identifier: Apache-2.0
"""Ranks in Ray's actors, and servers as deployments of Ray Serve behind Banyan's router there."""

import contextlib
import http.client
import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import psutil
import pytest
from test.e2e.conftest import Client, until

from benchmark.modes import asking, models
from benchmark.modes.__main__ import wrong
from benchmark.modes.rows import MODES
from benchmark.modes.run import run
from benchmark.ray_serve import served

pytestmark = [pytest.mark.e2e, pytest.mark.further]
PAGE_TOKENS = 16
ENGINE = ("--device", "cpu", "--max-total-tokens", "8000", "--context-length", "4096", "--sleep-on-idle")
ACTORS = [mode for mode in MODES if mode.name.startswith("Ray actors")]
LONG_TOKENS = 3000
ENDS_WITHIN_S, RESTARTS_WITHIN_S = 60.0, 600.0


@pytest.mark.parametrize("mode", ACTORS, ids=lambda mode: mode.name)
def test_actors_of_ray_when_a_server_has_them_then_it_shares_or_is_refused_as_the_list_says(mode, alone, tmp_path):
    found = run(mode, tmp_path)
    assert wrong(mode, found) is None, found


@pytest.fixture(scope="module")
def ray_serve(alone, tmp_path_factory):
    """A client of Ray Serve's address, one of each of the two servers, and one of Ray's own router."""
    arguments = ("--model-path", str(models.ensure(models.LLAMA).resolve()), *ENGINE)
    with served(arguments, tmp_path_factory.mktemp("ray"), routers=("prefix",)) as ray:
        urls = (ray.url, *ray.servers, ray.of("prefix"))
        client, *servers, of_ray = (Client(SimpleNamespace(url=url)) for url in urls)
        yield client, servers, of_ray


def cached(told):
    return told["meta_info"]["cached_tokens"]


def whole_pages(ids):
    return (len(ids) - 1) // PAGE_TOKENS * PAGE_TOKENS


def in_flight(servers):
    return sum(load["num_total_tokens"] for one in servers for load in json.loads(one.get("/v1/loads"))["loads"])


def test_request_when_it_comes_through_ray_serve_then_it_goes_where_its_prefix_is_and_the_answer_is_that_servers(
    ray_serve,
):
    client, servers, _ = ray_serve
    for number, ids in enumerate(asking.prompts(4)):
        home = servers[number % 2]
        tokens, _ = home.generate(ids)
        # The router hears of pages a moment later.
        time.sleep(1)
        again, meta = client.generate(ids)
        assert again == tokens and meta["cached_tokens"] == whole_pages(ids)


def test_stream_when_it_comes_through_ray_serve_then_it_comes_piece_by_piece_and_is_the_servers(ray_serve):
    client, servers, _ = ray_serve
    body = {**Client.body(asking.prompts(5)[4], num_tokens=40), "stream": True}
    ours, theirs = (events_of(one.server.url, body) for one in (client, servers[0]))
    assert len(ours) > 10 and ours[-1]["output_ids"] == theirs[-1]["output_ids"]


def test_caches_when_somebody_wants_them_emptied_through_ray_serve_then_forbidden(ray_serve):
    with pytest.raises(urllib.error.HTTPError, match="403"):
        ray_serve[0].post("/flush_cache", {})


def events_of(url, body):
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = response.read().decode().split("\n\n")
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_client_when_it_goes_away_in_mid_stream_then_the_server_stops_computing(ray_serve):
    client, servers, _ = ray_serve
    parts = urlsplit(client.server.url)
    body = {**Client.body(asking.prompts(6)[5], num_tokens=LONG_TOKENS), "stream": True}
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    assert in_flight(servers) > 0
    response.close()
    connection.close()
    began_s = time.monotonic()
    until(lambda: in_flight(servers) == 0, timeout_s=30)
    assert time.monotonic() - began_s < 10


def test_prompt_when_rays_prefix_aware_router_places_it_then_it_goes_where_ray_sent_its_beginning(ray_serve):
    _, _, client = ray_serve
    for ids in asking.prompts(12)[8:]:
        tokens = events_of(client.server.url, {**Client.body(ids), "stream": True})[-1]["output_ids"]
        last = events_of(client.server.url, {**Client.body(ids), "stream": True})[-1]
        assert last["output_ids"] == tokens and cached(last) == whole_pages(ids)


def test_server_when_it_is_killed_then_the_other_one_answers_and_ray_starts_it_again(ray_serve):
    client, servers, _ = ray_serve
    ids = asking.prompts(13)[12]
    expected, _ = servers[1].generate(ids)
    os.kill(pid_of(servers[0].server.url), signal.SIGKILL)
    until(lambda: not is_up(servers[0]), timeout_s=ENDS_WITHIN_S)
    assert client.generate(ids)[0] == expected
    until(lambda: is_up(servers[0]), timeout_s=RESTARTS_WITHIN_S)
    fresh = iter(asking.prompts(100)[13:])

    def is_known_again():
        ids = next(fresh)
        servers[0].generate(ids)
        return is_found(client, ids)

    until(is_known_again, timeout_s=ENDS_WITHIN_S)


def test_server_when_its_rank_stands_still_then_ray_starts_it_again(ray_serve):
    _, servers, _ = ray_serve
    url = servers[1].server.url
    # Ray may just be starting it again: on a machine that was busy with the other one, it may have been found silent.
    until(lambda: is_up(servers[1]) and ranks_of(url), timeout_s=RESTARTS_WITHIN_S)
    first = pid_of(url)
    for rank in ranks_of(url):
        os.kill(rank, signal.SIGSTOP)

    def is_another():
        # There is none for a moment.
        with contextlib.suppress(ValueError):
            return pid_of(url) != first and is_up(servers[1])

    until(is_another, timeout_s=RESTARTS_WITHIN_S)


def ranks_of(url):
    """The processes of its server's ranks."""
    # There is no server for a moment, where Ray starts it again.
    with contextlib.suppress(ValueError, psutil.NoSuchProcess):
        children = psutil.Process(pid_of(url)).children(recursive=True)
        return [one.pid for one in children if "schedul" in one.name()]
    return []


def is_found(client, ids):
    """Whether it goes where it is. The router hears of pages a moment after the answer."""
    time.sleep(1)
    return client.generate(ids)[1]["cached_tokens"] == whole_pages(ids)


def pid_of(url):
    """Of the process that was started as a server at this port."""
    port = f"--port\0{urlsplit(url).port}\0"
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # Others may end meanwhile.
        with contextlib.suppress(OSError):
            found += [int(path.parent.name)] if port in path.read_text() else []
    return min(found)


def is_up(client):
    try:
        return client.get("/health") == ""
    except OSError:
        return False
