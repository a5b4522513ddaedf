# SPDX-License-Identifier: Apache-2.0
"""What a running server tells of itself: in a terminal, in a browser through the router, to Prometheus."""

from __future__ import annotations

import json
import re
import urllib.request

import pytest
from playwright.sync_api import expect
from test.e2e.conftest import until
from test.page.conftest import browser, served  # noqa: F401

from banyan import cli
from banyan.cli import web
from banyan.router.app import build
from banyan.router.settings import Settings
from banyan.telemetry import SERIES, rid_pseudonym

pytestmark = pytest.mark.e2e


def test_top_when_a_prefix_was_fetched_then_it_is_among_the_hits_and_scripts_read_the_same(banyan, prompt, capsys):
    ids = prompt("seen in top", 800)
    before = banyan.total("peer_tokens")
    banyan.generate(ids, rank=0)
    banyan.generate(ids, rank=1)
    assert banyan.total("peer_tokens") - before == 784
    assert cli.main(["top", banyan.server.url, "--once", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [rank["dp_rank"] for rank in told["ranks"]] == [0, 1] and told["hits"]["peer"] >= 784
    assert all(rank["values"]["num_live_ranks"] == 2 for rank in told["ranks"])
    # Every page of this prompt lies in both pools, and after the flush before this test there is little else.
    assert 0.5 <= told["distinct_share"] < 0.75
    found = 1.0 - told["hits"]["computed"] / sum(told["hits"].values())
    assert found - 0.02 <= told["ceiling"]["24h"] <= 1.0, "more was found than could be"
    assert 0.0 < told["ceiling"]["same"] <= told["ceiling"]["double"]
    assert cli.main(["top", banyan.server.url, "--once"]) == 0
    assert "of the pages held are distinct" in capsys.readouterr().out


def turns(num_turns, head):
    """A conversation whose first line is what ``head`` says of the turn."""
    rules = " ".join(f"Rule {number}: count the boats at the river." for number in range(30))
    messages = []
    for turn in range(num_turns):
        messages += [{"role": "user", "content": f"Question {turn}: how many boats are there?"}]
        yield [{"role": "system", "content": f"You count boats.\n{head(turn)}\n{rules}"}, *messages]
        messages += [{"role": "assistant", "content": f"There are {turn + 3} boats at the river."}]


def ask(url, messages, session):
    """At rank 0, as a client that names its session by the way."""
    body = {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0, "routed_dp_rank": 0}
    headers = {"Content-Type": "application/json", "x-session-id": session}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def test_top_when_a_line_changes_in_every_turn_then_it_is_named_by_the_third_and_the_router_can_drop_it(banyan, capsys):
    before = banyan.total("changing_line_prompts")
    for messages in turns(3, lambda turn: f"stamp: {turn * 7919}"):
        ask(banyan.server.url, messages, "a session")
    assert banyan.total("changing_line_prompts") - before == 1
    assert cli.main(["top", banyan.server.url, "--once", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)["changing_lines"][-1]
    assert (line["dp_rank"], line["num_prompts"], line["part"], line["text"]) == (0, 3, "system", "")
    application, _ = build(Settings(servers=(banyan.server.url,), drop_line="^stamp: "))
    with served(application) as url:
        parted, prompts, own = (banyan.total(name) for name in ("parted_prompts", "prompt_tokens", "own_tokens"))
        for messages in turns(5, lambda turn: f"stamp: {turn * 104729}"):
            ask(url, messages, "another session")
    assert banyan.total("parted_prompts") == parted
    found = (banyan.total("own_tokens") - own) / (banyan.total("prompt_tokens") - prompts)
    assert found > 0.7, "all but the first turn"


def test_top_when_the_server_is_stock_then_one_line(stock, capsys):
    with stock.awake():
        assert cli.main(["top", stock.server.url, "--once"]) == 1
    assert capsys.readouterr().err.endswith("runs without Banyan: start it with --enable-banyan\n")


def test_page_when_the_router_serves_it_then_a_browser_shows_the_ranks_the_tree_and_a_requests_life(
    banyan,
    prompt,
    browser,  # noqa: F811
):
    shared = prompt("a system prompt", 480)
    for number, rank in enumerate((0, 1, 0)):
        banyan.generate([*shared, *prompt(f"question {number}", 200)], rank=rank)
    rid = banyan.generate([*shared, *prompt("question 0", 200)], rank=1)[1]["id"]
    application, _ = build(Settings(servers=(banyan.server.url,)))
    with served(application) as url:
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.set_default_timeout(60_000)
        tab.goto(f"{url}/banyan")
        expect(tab.locator("#ranks tbody tr")).to_have_count(2, timeout=60_000)
        # Question 0 was asked at both ranks: each remembers it.
        trunk = tab.get_by_role("treeitem", name="tokens 0 to 480, 4 prompts")
        expect(trunk).to_have_count(1)
        assert "rank 0 100 %, rank 1 100 %" in trunk.get_attribute("aria-label")
        tab.get_by_label("Request id").fill(rid)
        tab.keyboard.press("Enter")
        expect(tab.locator("#life .steps li").last).to_have_text("landed")
        expect(tab.locator("#router tbody")).to_contain_text(banyan.server.url)
        tab.close()


def test_page_when_a_running_server_is_asked_something_then_its_figures_go_on_without_a_reload(
    banyan,
    prompt,
    browser,  # noqa: F811
):
    banyan.generate(prompt("before anybody looks", 300), rank=0)
    with served(web.build([banyan.server.url])) as url:
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.set_default_timeout(60_000)
        tab.goto(url)
        expect(tab.locator("#ranks tbody tr")).to_have_count(2, timeout=60_000)
        before = tab.screenshot()
        asked = prompt("asked while somebody looks", 800)
        rids = [banyan.generate(asked, rank=rank)[1]["id"] for rank in (0, 1)]
        shown = rid_pseudonym(banyan.ranks()[1]["rid_nonce"], rids[1])
        recent = tab.get_by_role("region", name="Recent requests")
        expect(recent).to_contain_text(shown[:12])
        expect(recent).not_to_contain_text(rids[1][:12])
        expect(tab.locator("#chart polygon")).to_have_count(5)
        # The page's own sums are the counters of the ranks.
        ranks = banyan.ranks().values()
        sources = ("own_tokens", "peer_tokens", "host_tokens", "store_tokens")
        cached = sum(rank[name] for rank in ranks for name in sources) / sum(rank["prompt_tokens"] for rank in ranks)
        tile = tab.get_by_role("region", name="Found in a cache").locator(".big")
        expect(tile).to_have_text(re.compile(rf"^({int(100 * cached)}|{int(100 * cached) + 1})(\.\d+)? %$"))
        assert tab.screenshot() != before
        tab.close()


def test_metrics_when_a_server_runs_then_each_that_is_described_is_there(banyan, prompt):
    banyan.first_token(prompt("counted", 300), rank=0)
    own = [name for name in SERIES if not name.startswith("store_") or name == "store_tokens"]
    expected = {SERIES[name].name for name in own}

    def missing():
        lines = banyan.get("/metrics").splitlines()
        return sorted(expected - {re.split("[{ ]", line)[0] for line in lines if line.startswith("banyan:")})

    until(lambda: not missing(), told=missing)
    lines = banyan.get("/metrics").splitlines()
    for rank in ("0", "1"):
        assert any(line.startswith("banyan:prompt_tokens_total{") and f'dp_rank="{rank}"' in line for line in lines)
