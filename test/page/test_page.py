# SPDX-License-Identifier: Apache-2.0
"""What a person sees and does at the page, in a real browser."""

from __future__ import annotations

from playwright.sync_api import expect

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><b>bold</b>"


def drawn(tab):
    return tab.evaluate("document.body.dataset.drawn")


def held(tab, url, ask=lambda: None):
    """Waits for a question of the page that is not answered until what comes back is called."""
    asked = []
    tab.route(url, lambda route: asked.append(route))
    ask()
    while not asked:
        tab.wait_for_timeout(20)
    return asked[0].continue_


def test_page_when_a_server_is_well_then_its_figures_are_there_and_go_on(show, server):
    tab = show(server)
    expect(tab).to_have_title("Banyan")
    assert tab.url.endswith("/banyan")
    prompts = sum(one.prompt_tokens for one in server.counters)
    cached = 1 - sum(
        one.prompt_tokens - one.own_tokens - one.peer_tokens - one.host_tokens - one.store_tokens
        for one in server.counters
    ) / max(prompts, 1)
    tile = tab.get_by_role("region", name="Found in a cache")
    assert abs(float(tile.locator(".big").inner_text().split()[0]) - 100 * cached) < 2
    could = tab.get_by_role("region", name="Could be found")
    expect(could.locator(".big")).to_have_text("93.0 %")
    expect(could).to_contain_text("half the memory 44.0 %, as it is 64.0 %, twice 88.0 %")
    assert tab.locator("#ranks tbody tr").count() == 2
    expect(tab.locator("#alerts")).to_contain_text("Nothing needs you")
    before = drawn(tab)
    tab.wait_for_selector(f"body:not([data-drawn='{before}'])")
    expect(tab.locator("#chart polygon")).to_have_count(5)
    expect(tab.locator("#chart-said")).to_contain_text("tokens a second: own pool")


def test_page_when_a_line_changes_in_every_turn_then_it_is_said_where_and_its_text_is_text(show, server):
    tab = show(server)
    expect(tab.locator("#lines-card")).to_be_hidden()
    line = {"place": 23, "num_prompts": 3, "num_tokens": 900, "part": "system", "text": HOSTILE}
    server.more[1] = {"changing_lines": [line]}
    card = tab.get_by_role("region", name="Changing lines")
    expect(card.locator("tbody td")).to_have_text(["1", "23", "900", "system", "3", HOSTILE])


def test_tree_when_prompts_share_their_beginning_then_the_keyboard_walks_it_and_says_who_holds_what(show, server):
    tab = show(server)
    first = tab.get_by_role("treeitem").first
    expect(first).to_have_attribute(
        "aria-label",
        "tokens 0 to 320, 9 prompts, 26 turns, held by rank 0 100 %, rank 1 100 %, arena 100 %",
    )
    first.focus()
    tab.keyboard.press("Enter")
    expect(tab.locator("#branch")).to_contain_text("Tokens 0 to 320 in common to 9 prompts")
    tab.keyboard.press("ArrowDown")
    assert tab.evaluate("document.activeElement.getAttribute('aria-level')") == "2"
    tab.keyboard.press("End")
    tab.keyboard.press(" ")
    expect(tab.locator("#branch")).to_contain_text("Tokens 0 to 480")
    at = tab.evaluate("document.activeElement.dataset.key")
    server.ask([f"new-{n}" for n in range(4)], 1)
    expect(tab.get_by_role("treeitem", name="tokens 0 to 64")).to_have_count(1)
    assert tab.evaluate("document.activeElement.dataset.key") == at, "the place is lost when the tree is drawn again"


def test_life_when_a_request_is_asked_for_then_its_steps_are_there_or_why_not(show, server):
    rid = server.ask([f"mine-{n}" for n in range(40)], 1, rid="my-request")
    tab = show(server)
    tab.get_by_label("Request id").fill(rid)
    tab.get_by_role("button", name="Explain").click()
    life = tab.locator("#life")
    expect(life).to_contain_text("my-request")
    expect(life.locator(".steps li")).to_have_text(["planned", "leased", "landed"])
    expect(life).to_contain_text("160 tokens in the own pool, 320 moved, 165 computed")
    tab.get_by_label("Request id").fill("nobody")
    tab.keyboard.press("Enter")
    expect(life).to_contain_text("No rank remembers nobody")


def test_page_when_names_are_hostile_then_they_are_text(show, server):
    server.name = HOSTILE
    server.ask([f"evil-{n}" for n in range(40)], 0, rid=HOSTILE)
    tab = show(server)
    expect(tab.locator("#about")).to_contain_text(HOSTILE)
    tab.get_by_label("Request id").fill(HOSTILE)
    tab.get_by_role("button", name="Explain").click()
    expect(tab.locator("#life strong")).to_have_text(HOSTILE)
    assert tab.locator("img").count() == 0 and tab.locator("b", has_text="bold").count() == 0
    expect(tab).to_have_title("Banyan")


def test_page_when_a_server_stops_answering_then_it_is_said_until_it_does_again(show, server):
    tab = show(server)
    server.status = 500
    expect(tab.get_by_role("alert")).to_contain_text("does not answer")
    expect(tab.get_by_role("status")).to_have_text("not answering")
    assert tab.locator("#ranks tbody tr").count() == 2, "what was seen last stays"
    server.status = 200
    expect(tab.get_by_role("status")).to_have_text("live")
    expect(tab.get_by_role("alert")).to_be_empty()


def test_page_when_a_server_runs_without_banyan_then_one_line_says_what_to_do(show, server):
    server.banyan = False
    tab = show(server)
    expect(tab.get_by_role("alert")).to_contain_text("runs without Banyan: start it with --enable-banyan")
    expect(tab.locator("#body")).to_be_hidden()


def test_page_when_no_server_shares_then_the_routers_table_still_says_what_it_knows_of_them(show, server):
    server.banyan = False
    tab = show(server)
    row = {"server": "http://a", "role": "null", "state": "down", "is_draining": False, "num_in_flight": 3}
    told = {
        "servers": [{"url": "http://a", "error": "none"}],
        "router": [{**row, "known_blocks": [], "last_error": "no"}],
    }
    tab.route("**/data", lambda route: route.fulfill(json=told))
    expect(tab.get_by_role("region", name="Router").locator("tbody td")).to_have_text(
        ["http://a", "null", "down", "3", "0", "no"]
    )


def test_page_when_something_is_wrong_then_the_alert_names_the_rank_and_the_way_out(show, server):
    server.more[1] = {"num_quarantined_pages": 90}
    tab = show(server)
    expect(tab.locator("#alerts")).to_contain_text("BanyanQuarantine")
    expect(tab.locator("#alerts")).to_contain_text("Rank 1: a tenth of the pool waits for its readers")


def test_page_when_there_are_two_servers_then_one_is_chosen_and_paused_means_that_nothing_is_asked(show, server):
    other = type(server)(4, store=False, name="another")
    tab = show(server, other)
    tab.get_by_label("Server").select_option(index=1)
    expect(tab.locator("#about")).to_contain_text("another")
    assert tab.locator("#ranks tbody tr").count() == 4
    expect(tab.get_by_role("region", name="Store")).to_have_count(0)
    tab.get_by_role("button", name="Pause").click()
    expect(tab.get_by_role("status")).to_have_text("paused")
    tab.wait_for_timeout(300)
    num_asked = server.num_asked
    tab.wait_for_timeout(2_500)
    assert server.num_asked == num_asked
    tab.get_by_role("button", name="Go on").click()
    expect(tab.get_by_role("status")).to_have_text("live")


def test_page_when_it_is_paused_while_a_question_is_under_way_then_it_stays_paused(show, server):
    tab = show(server)
    go_on = held(tab, "**/data")
    tab.get_by_role("button", name="Pause").click()
    before = drawn(tab)
    go_on()
    tab.wait_for_selector(f"body:not([data-drawn='{before}'])")
    expect(tab.get_by_role("status")).to_have_text("paused")


def test_life_when_an_answer_comes_later_than_the_next_ones_then_it_is_not_shown(show, server):
    tab = show(server)
    tab.get_by_label("Request id").fill("first")
    go_on = held(tab, "**=first", lambda: tab.keyboard.press("Enter"))
    tab.get_by_label("Request id").fill("second")
    tab.keyboard.press("Enter")
    expect(tab.locator("#life")).to_contain_text("No rank remembers second")
    with tab.expect_response("**=first"):
        go_on()
    tab.wait_for_timeout(300)
    expect(tab.locator("#life")).to_contain_text("No rank remembers second")


def test_page_when_it_is_narrow_or_dark_then_nothing_sticks_out_and_the_ground_is_dark(show, server):
    tab = show(server, width=390, scheme="dark")
    tab.wait_for_selector(".branch")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    red, green, blue = tab.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert red + green + blue < 120
