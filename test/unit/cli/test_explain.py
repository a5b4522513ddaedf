# SPDX-License-Identifier: Apache-2.0
import json
import socket

import pytest

from banyan import cli
from banyan.cli import explain
from banyan.core import Outcome, Run, SourceKind
from banyan.planner import MoveRates, Planner, PrefillCost, PrefillTimes, Pricing, Tail
from banyan.telemetry import Dropped, Pseudonyms, rid_pseudonym

NAMES = Pseudonyms("what the server's processes know")


class FakeEngine:
    def __init__(self, url, api_key=None, timeout_s=None):
        self.url = url

    def ranks(self):
        states = ({"plans": [], "dropped": []}, {"plans": made_plans(), "dropped": made_drops()})
        return {rank: NAMES.told({"prompts": [], **state}) for rank, state in enumerate(states)}


def made_drops():
    """What a rank tells of three leaves that have left its tree."""
    seconds = iter((10.0, 11.0, 12.0, 14.5))
    dropped = Dropped(lambda: next(seconds))
    dropped.went("a" * 64, 12, None, is_again=False)
    dropped.went("b" * 64, 3, SourceKind.PEER, is_again=True)
    dropped.went("c" * 64, 1, SourceKind.HOST, is_again=False)
    return dropped.state()


def made_plans():
    """What a real planner explains: one measured plan and one without figures."""
    rates = MoveRates()
    times = PrefillTimes(PrefillCost(1000.0, 100.0, 0.0, 0.0))
    planner = Planner(Pricing(times=times, rates=rates, num_layers=30), min_pages=1)
    found = Tail(own_tokens=32, prompt_tokens=200, page_tokens=16, runs=(Run(SourceKind.PEER, 10),), max_rank=3)
    planner.decide("first", found)
    rates.observe(SourceKind.PEER, 160, 480.0)
    planner.decide("second", found)
    planner.record("second", Outcome.LANDED)
    planner.decide("abroad", Tail(32, 200, 16, runs=(Run(SourceKind.HOST, 2), Run(SourceKind.REMOTE, 8, "b:7400"))))
    planner.decide("own", Tail(32, 200, 16, runs=(Run(SourceKind.STORE, 10),)))
    planner.decide("split", Tail(32, 200, 16, runs=(Run(SourceKind.STORE, 2), Run(SourceKind.REMOTE, 8, "b:7400"))))
    planner.decide("through", Tail(32, 200, 16, runs=(Run(SourceKind.REMOTE, 10, "b:7400"),)))
    return planner.explain()


@pytest.fixture(autouse=True)
def _engine(monkeypatch):
    monkeypatch.setattr("banyan.cli.engine.Engine", FakeEngine)


def test_explain_when_another_node_has_pages_then_it_is_named(capsys):
    assert cli.main(["explain", "abroad"]) == 0
    assert "found elsewhere: 32 tokens at host, 128 tokens at remote b:7400" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rid", "path"),
    [
        ("own", "own store"),
        ("through", "through b:7400"),
        ("split", "split at 64 tokens, behind them through b:7400"),
        ("abroad", "split at 64 tokens, behind them through b:7400"),
    ],
)
def test_explain_when_stores_were_read_then_by_whom_is_said(rid, path, capsys):
    assert cli.main(["explain", rid]) == 0
    assert f"  path: {path}\n" in capsys.readouterr().out


def test_explain_when_the_request_is_remembered_then_the_plan_and_its_figures_are_said(capsys):
    assert cli.main(["explain", "second"]) == 0
    text = capsys.readouterr().out
    assert "second on rank 1: prompt of 200 tokens, 32 in the rank's own tree, tail of 168" in text
    assert "found elsewhere: 160 tokens at peer" in text
    assert "dp_origin_kv_len 32, dp_max_kv_len 192, dp_max_kv_rank 3" in text
    assert "plan: move 160 tokens, compute 8; expected to be faster; landed" in text
    assert "recompute: 17.80 ms expected" in text
    assert "landed after " in text
    assert "first" not in text


def test_explain_when_a_time_was_not_known_then_no_figure_is_made_up(capsys):
    assert cli.main(["explain", "first"]) == 0
    text = capsys.readouterr().out
    assert "a time is not known yet" in text and "best move" not in text


def test_explain_when_json_is_asked_for_then_plain_values(capsys):
    assert cli.main(["explain", "all", "--json"]) == 0
    told = [one["rid"] for one in json.loads(capsys.readouterr().out)]
    rids = ("first", "second", "abroad", "own", "split", "through")
    assert told == [rid_pseudonym(NAMES.nonce, rid) for rid in rids]


def test_explain_when_asked_by_the_pseudonym_then_it_is_the_same_decision(capsys):
    shown = rid_pseudonym(NAMES.nonce, "second")
    assert cli.main(["explain", shown]) == 0
    assert f"{shown} on rank 1: prompt of 200 tokens" in capsys.readouterr().out


def test_explain_when_nobody_remembers_then_the_reasons_are_said_and_exit_1(capsys):
    assert cli.main(["explain", "other"]) == 1
    assert "no rank remembers other" in capsys.readouterr().err


def test_explain_when_pages_were_dropped_then_why_it_was_these(capsys):
    assert cli.main(["explain", "dropped"]) == 0
    of_key = NAMES.of_key
    assert capsys.readouterr().out.splitlines() == [
        f"rank 1, 2.5 s ago: 1 page(s) up to {of_key('c' * 64)}: a duplicate (host had it), asked for once",
        f"rank 1, 3.5 s ago: 3 page(s) up to {of_key('b' * 64)}: a duplicate (peer had it), asked for again before",
        f"rank 1, 4.5 s ago: 12 page(s) up to {of_key('a' * 64)}: the last copy, asked for once",
    ]


def test_explain_when_a_rank_tells_commands_of_a_terminal_then_they_are_text(monkeypatch, capsys):
    (plan, *_), (leaf, *_) = made_plans(), made_drops()
    told = {"plans": [{**plan, "outcome": "\x1b[2J"}], "dropped": [{**leaf, "key": "\x1b[2J"}]}
    monkeypatch.setattr(FakeEngine, "ranks", lambda self: {0: told})
    assert [cli.main(["explain", rid]) for rid in ("all", "dropped")] == [0, 0]
    assert "\x1b" not in capsys.readouterr().out


def test_explain_when_a_rank_of_another_release_tells_it_otherwise_then_one_line_and_exit_1(monkeypatch, capsys):
    monkeypatch.setattr(FakeEngine, "ranks", lambda self: {0: {"plans": [{**made_plans()[0], "computed": [1]}]}})
    assert cli.main(["explain", "all"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "another release" in err and err.count("\n") == 1


def test_explain_when_nothing_was_looked_up_then_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(FakeEngine, "ranks", lambda self: {0: {"plans": []}})
    assert cli.main(["explain", "all"]) == 0
    assert "no rank remembers a request" in capsys.readouterr().out


def test_explain_when_nothing_was_dropped_then_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(FakeEngine, "ranks", lambda self: {0: {"dropped": []}})
    assert cli.main(["explain", "dropped"]) == 0
    assert "no rank has dropped a page" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["explain", "all"], ["top", "--once"], ["web", "--port", "1"]])
def test_command_when_the_keys_file_is_missing_or_no_text_then_one_line_says_so(words, tmp_path, capsys):
    broken = tmp_path / "broken"
    broken.write_bytes(b"\xff")
    assert [cli.main([*words, "--api-key-file", str(file)]) for file in (tmp_path / "none", broken)] == [1, 1]
    first, second = capsys.readouterr().err.splitlines()
    assert "No such file" in first and "can't decode" in second and "--api-key-file" in second


@pytest.mark.parametrize("port", ["70000", "0", "-1"])
def test_web_when_its_port_is_none_then_one_line_and_no_address(port, monkeypatch, capsys):
    monkeypatch.setattr("uvicorn.Server.run", lambda self: pytest.fail("it serves"))
    assert cli.main(["web", "--port", port]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "from 1 to 65535" in err and err.count("\n") == 1


def test_explain_when_the_server_does_not_answer_then_it_does_not_wait_for_minutes(monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.setattr(explain, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert cli.main(["explain", "all", "--url", f"http://127.0.0.1:{silent.getsockname()[1]}"]) == 1
    assert "timed out" in capsys.readouterr().err
