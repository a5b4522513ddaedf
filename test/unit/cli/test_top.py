# SPDX-License-Identifier: Apache-2.0
import io
import json

import pytest
from rich.console import Console
from test.unit.observe.fake_banyan import FakeBanyan

from banyan import cli
from banyan.cli import top
from banyan.observe import asking
from banyan.telemetry.gauges import GAUGES


@pytest.fixture(autouse=True)
def server(monkeypatch, request):
    made = FakeBanyan(**getattr(request, "param", {}))

    async def answer(session, url, api_key):
        if url.endswith("/v1/loads?include=core"):
            return made.loads()
        made.step()
        return made.info()

    monkeypatch.setattr(asking, "_json", answer)
    return made


def test_top_once_when_the_server_shares_then_ranks_hits_store_and_alerts_are_there(capsys, server):
    server.more[1] = {"fetches_failed": 2}
    assert cli.main(["top", "http://a", "--once"]) == 0
    text = capsys.readouterr().out
    for word in (
        "since the start",
        "own pool 35.",
        "peers",
        "quarantine",
        "displaced",
        "arena     1.6k of 3.0k",
        "B/day of",
    ):
        assert word in text
    assert "warning   BanyanFetchFailed (rank 1): copies do not land" in text
    assert "90.0% of the pages held are distinct" in text


def test_top_once_when_ranks_have_shards_then_it_is_said_that_the_first_one_tells(capsys, server):
    for more in server.more:
        more["layout"] = {"attn_tp": 2, "attn_cp": 2}
    server.more[1] |= {"fetches_failed": 2}
    assert cli.main(["top", "--once"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "first of 4 shards of each rank" in told and "(counted since the start)" in told


def test_top_once_when_prompts_were_answered_then_what_could_have_been_found_is_there(capsys, server):
    cli.main(["top", "http://a", "--once"])
    text = capsys.readouterr().out
    assert "ceiling   71.0% (15m), 82.0% (1h), 93.0% (24h) could have been found" in text
    assert "half the memory 44.0%, as it is 64.0%, twice 88.0%" in text


def test_top_once_when_a_line_changes_in_every_turn_then_it_is_said_where_and_what(capsys, server):
    line = {"place": 23, "num_prompts": 3, "num_tokens": 900, "part": "system", "text": "[red]cch=1"}
    server.more[1] = {"changing_line_prompts": 1, "changing_lines": [line, {**line, "part": "", "text": ""}]}
    cli.main(["top", "http://a", "--once"])
    text = " ".join(capsys.readouterr().out.split())
    where = "rank 1: after token 23 of 900"
    assert f"line {where} in system, in 3 prompts of a session in a row: '[red]cch=1'" in text
    assert f"line {where}, in 3 prompts of a session in a row" in text
    assert "warning BanyanChangingLine (rank 1)" in text and "banyan route --drop-line" in text


def test_top_once_when_none_was_answered_then_no_ceiling_is_made_up(capsys, server):
    for more in server.more:
        more |= {name: 0.0 for name in GAUGES if name.startswith(("heard_tokens", "hit_ceiling", "hit_share"))}
    cli.main(["top", "http://a", "--once"])
    assert "ceiling   no prompt was answered in the last 24h" in capsys.readouterr().out


def test_top_once_json_when_asked_for_then_plain_values(capsys):
    assert cli.main(["top", "http://a", "--once", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [rank["dp_rank"] for rank in told["ranks"]] == [0, 1] and told["alerts"] == []
    assert told["ranks"][0]["values"]["displaced_pages"] == 6


def test_top_when_the_server_runs_without_banyan_then_one_line_and_exit_1(capsys, server):
    server.banyan = False
    assert cli.main(["top", "http://a", "--once"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err == "banyan top: http://a runs without Banyan: start it with --enable-banyan\n"


def test_top_when_nobody_listens_there_then_one_line_and_exit_1(capsys, monkeypatch):
    monkeypatch.undo()
    assert cli.main(["top", "http://127.0.0.1:9/", "--once"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("banyan top: http://127.0.0.1:9 does not answer: ")


def test_top_when_json_is_asked_for_again_and_again_then_refused(capsys):
    assert cli.main(["top", "--json"]) == 2
    assert "--json: with --once only" in capsys.readouterr().err


def test_top_when_the_server_tells_markup_or_commands_of_a_terminal_then_they_are_text(capsys, server):
    server.name = "[red]m[/red]\x1b[2J"
    server.more[1] = {
        "changing_lines": [{"place": 23, "num_prompts": 3, "num_tokens": 900, "part": "\x1b", "text": "\x1b"}]
    }
    cli.main(["top", "http://a", "--once"])
    text = capsys.readouterr().out
    assert "[red]m[/red] [2J" in text and "\x1b" not in text


def test_watch_when_the_server_does_not_answer_for_a_while_then_the_reason_is_shown_and_it_goes_on(monkeypatch):
    sleeps, text = watched(monkeypatch, [True, False, True, True], height=60)
    assert sleeps == [2.0] * 4
    assert "it rests" in text and "since the last look" in text


@pytest.mark.parametrize("server", [{"num_ranks": 24}], indirect=True)
def test_watch_when_the_screen_has_fewer_lines_than_the_server_ranks_then_alerts_and_the_error_are_seen(
    monkeypatch, server
):
    server.more[20] = {"fetches_failed": 1}
    _, text = watched(monkeypatch, [True, False, False, False], height=12)
    assert "BanyanFetchFailed (rank 20)" in text and "it rests" in text


def watched(monkeypatch, answers, *, height):
    """How long was slept, and what was shown, while the server answers or not."""
    sleeps = []

    def sleep(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", sleep)
    answers = iter(answers)

    def look():
        if not next(answers):
            raise asking.Unanswered("http://a: it rests")
        return top.look("http://a", None)

    console = Console(record=True, width=160, height=height, file=io.StringIO(), force_terminal=True)
    with pytest.raises(KeyboardInterrupt):
        top.watch(look, interval_s=2.0, console=console)
    return sleeps, console.export_text()
