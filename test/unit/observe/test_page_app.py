# SPDX-License-Identifier: Apache-2.0
"""The page over HTTP: whom it answers, what it lets a browser do, how often it asks a server."""

from __future__ import annotations

import asyncio
import re
import threading

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from test.unit.observe.fake_banyan import FakeBanyan
from test.unit.observe.test_reading import read
from test.unit.router.fake_server import Served

from banyan.cli import web
from banyan.observe import asking, watched
from banyan.observe.asking import Unanswered
from banyan.observe.prefix_tree import prefix_tree
from banyan.observe.reading import Reading
from banyan.observe.watched import LEAST_AGE_S, Watched
from banyan.observe.webpage import Page, is_ours, page_and_policy


def asked(host, client="127.0.0.1"):
    headers = [(b"host", host.encode())]
    return Request({"type": "http", "method": "GET", "headers": headers, "client": (client, 1) if client else None})


@pytest.mark.parametrize("host", ["127.0.0.1:30100", "localhost:1", "[::1]:30100", "10.0.0.7"])
def test_page_when_asked_from_this_machine_under_an_address_then_answered(host):
    assert is_ours(asked(host))


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("evil.example:30100", "127.0.0.1"),
        ("127.0.0.1", "10.0.0.7"),
        ("", "127.0.0.1"),
        ("127.0.0.1", None),
        ("[", "::1"),
    ],
)
def test_page_when_asked_from_elsewhere_or_under_a_name_then_refused(host, client):
    assert not is_ours(asked(host, client))


def test_page_when_it_is_read_then_nothing_of_it_comes_from_another_host():
    text, policy = page_and_policy()
    assert "innerHTML" not in text and "insertAdjacent" not in text and "document.write" not in text
    assert set(re.findall(r"https?://[^\s\"'%]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"\sstyle=|\son[a-z]+=\"", text.split("<script>")[0]), "the policy forbids these"


def channel(value):
    value /= 255
    return value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4


def luminance(colour):
    digits = colour.lstrip("#")
    digits = "".join(digit * 2 for digit in digits) if len(digits) == 3 else digits
    red, green, blue = (channel(int(digits[at : at + 2], 16)) for at in (0, 2, 4))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_when_text_stands_on_them_then_the_contrast_is_four_and_a_half(scheme):
    blocks = re.findall(r":root \{(.*?)\}", page_and_policy()[0], re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]+)", blocks[scheme]))
    for text, ground in (
        *((ink, ground) for ink in ("ink", "soft") for ground in ("card", "ground", "hover")),
        ("accent", "card"), ("good", "card"), ("bad", "bad-ground"), ("warn", "warn-ground"),
        ("ink", "warn-ground"), ("soft", "warn-ground"), ("soft", "bad-ground"),
    ):  # fmt: skip
        one, other = sorted((luminance(colours[text]), luminance(colours[ground])))
        assert (other + 0.05) / (one + 0.05) >= 4.5, f"{text} on {ground}"


def test_watched_when_many_look_then_the_server_is_asked_once_a_second_and_errors_are_told():
    async def scenario():
        server, now_s, num_looks = FakeBanyan(), [100.0], [0]

        async def look(url):
            num_looks[0] += 1
            if num_looks[0] == 2:
                raise Unanswered("it rests")
            server.step()
            return read(server)

        watched = Watched("http://a", look, lambda: now_s[0])
        told = await asyncio.gather(*(watched.told() for _ in range(5)))
        assert num_looks == [1] and all(one["is_since_start"] for one in told)
        now_s[0] += LEAST_AGE_S
        assert (await watched.told())["error"] == "it rests"
        now_s[0] += LEAST_AGE_S
        again = await watched.told()
        assert again["error"] == "" and not again["is_since_start"] and len(again["history"]) == 2
        (life,) = await watched.lives(again["recent"][0]["rid"])
        assert life["sentences"] and life["url"] == "http://a"
        assert await watched.lives("other") == []

    asyncio.run(scenario())


def test_watched_when_the_server_hangs_then_what_was_seen_last_is_told_and_it_is_asked_once(monkeypatch):
    async def scenario():
        answers, now_s, num_looks = asyncio.Event(), [100.0], [0]

        async def look(url):
            num_looks[0] += 1
            await answers.wait()
            return read(FakeBanyan())

        seen = Watched("http://a", look, lambda: now_s[0])
        assert await seen.told() == {"url": "http://a", "error": "http://a has not answered yet"}
        assert await seen.lives("r") == [] and num_looks == [1]
        answers.set()
        monkeypatch.setattr(watched, "PATIENCE_S", 10)
        assert (await seen.told())["error"] == ""
        monkeypatch.setattr(watched, "PATIENCE_S", 0.05)
        answers.clear()
        now_s[0] += LEAST_AGE_S
        assert len((await seen.told())["history"]) == 1 and num_looks == [2]

    monkeypatch.setattr(watched, "PATIENCE_S", 0.05)
    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize(
    ("health", "said"), [((503, "ranks that do not report: 1\n"), ": ranks that do not report: 1"), ((200, ""), "")]
)
def test_look_when_the_server_does_not_answer_and_a_rank_stands_still_then_that_is_said(
    served, monkeypatch, health, said
):
    """All ranks are asked for figures: no alert tells of it."""
    url, answers, _ = served
    answers["/health_ranks"] = health

    async def hang(session, url, api_key):
        await asyncio.sleep(60)

    async def look():
        async with aiohttp.ClientSession() as session:
            await asking.look(session, url, None)

    monkeypatch.setattr(asking, "_json", hang)
    monkeypatch.setattr(asking, "TIMEOUT_S", 0.05)
    with pytest.raises(Unanswered) as raised:
        asyncio.run(look())
    assert str(raised.value) == f"{url} has not answered for 0.05 s{said}"


def test_watched_when_many_look_then_the_tree_is_laid_once_for_each_reading_and_beside_the_loop(monkeypatch):
    threads = []

    def laid(reading):
        threads.append(threading.get_ident())
        return prefix_tree(reading)

    async def look(url):
        return read(FakeBanyan())

    async def scenario():
        seen = Watched("http://a", look)
        told = await asyncio.gather(*(seen.told() for _ in range(5)))
        assert all(one["tree"] for one in told) and len(threads) == 1 and threads != [threading.get_ident()]

    monkeypatch.setattr(watched, "prefix_tree", laid)
    asyncio.run(scenario())


def another_releases(plans):
    """What a rank tells of its decisions where they have other fields, or other things in them."""
    without = [{name: value for name, value in plans[0].items() if name != gone} for gone in ("rid", "found", "steps")]
    return [*without, *({**plans[0], **other} for other in OTHER_FIELDS), "none", None]


OTHER_FIELDS = (
    {"rid": 7},
    {"found": [["peer"]]},
    {"found": {"peer": 3}},
    {"steps": [{"what": "landed"}]},
    {"computed": {"dreamt": 5}},
    {"prompt_tokens": "many"},
    {"expected_us": "soon"},
    {"error_us": 10**400},
    {"planned_s": "today"},
    {"outcome": ["landed"]},
    {"found": [[["peer"], 3]]},
)


def test_page_when_a_server_tells_of_requests_as_another_release_then_the_others_are_still_shown():
    async def scenario():
        ours = FakeBanyan(num_ranks=1)
        plans = ours.planners[0].explain()
        rid = plans[-1]["rid"]

        async def look(url):
            info = ours.info()
            if url == "http://other":
                state = info["internal_states"][0]["banyan"]
                state["plans"] = [*another_releases(state["plans"]), state["plans"][0]]
            return Reading.of(url, ours.now_s, info, ours.loads())

        served = Served(Starlette(routes=Page(["http://other", "http://ours"], look).routes()))
        await served.start()
        async with aiohttp.ClientSession() as client:
            async with client.get(f"{served.url}/banyan/data") as response:
                servers = (await response.json())["servers"]
                assert [len(one["recent"]) for one in servers] == [1, min(len(plans), 20)]
            async with client.get(f"{served.url}/banyan/request", params={"rid": rid}) as response:
                assert response.status == 200 and [one["url"] for one in await response.json()] == ["http://ours"]
        await served.stop()

    asyncio.run(scenario())


def test_error_when_a_server_says_commands_of_a_terminal_then_they_are_text():
    assert str(Unanswered("http://a: 500, \x1b[2J")) == "http://a: 500,  [2J"


def test_page_when_a_server_tells_too_much_then_the_rest_is_not_read_and_it_is_said(monkeypatch):
    monkeypatch.setattr(asking, "MAX_TOLD_BYTES", 1 << 20)

    async def much(request):
        return PlainTextResponse(b" " * (2 << 20) + b"{}")

    async def scenario():
        served = Served(Starlette(routes=[Route("/server_info", much)]))
        await served.start()
        async with aiohttp.ClientSession() as client:
            with pytest.raises(Unanswered, match="an answer of more than 1 MiB"):
                await asking.look(client, served.url, None)
        await served.stop()

    asyncio.run(scenario())


def test_web_when_the_root_is_asked_for_then_the_page_and_nothing_else():
    application = web.build(["http://127.0.0.1:1/"])
    assert isinstance(application, Starlette) and web.HOST == "127.0.0.1"

    async def scenario():
        served = Served(application)
        await served.start()
        async with aiohttp.ClientSession() as client:
            async with client.get(served.url) as response:
                assert response.url.path == "/banyan" and "<title>Banyan" in await response.text()
            async with client.get(f"{served.url}/banyan/data") as response:
                (server,) = (await response.json())["servers"]
                assert server["url"] == "http://127.0.0.1:1" and "does not answer" in server["error"]
            async with client.get(f"{served.url}/banyan/data", headers={"host": "evil.example"}) as response:
                assert response.status == 403
            async with client.post(f"{served.url}/banyan/data") as response:
                assert response.status == 405
        await served.stop()

    asyncio.run(scenario())
