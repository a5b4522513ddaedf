# SPDX-License-Identifier: Apache-2.0
"""Three carriers side by side: what the rows come to, and what is measured of a pair."""

from types import SimpleNamespace

import pytest

from benchmark import carriers_page, mooncake, remote_carriers
from benchmark.carriers import KINDS, Taken
from benchmark.carriers_summary import summarise

TAKEN = {"page_server": Taken(), "mooncake": Taken(memory_bytes=1000.0)}


def row(carrier, repeat, carried_s, *, tokens=96, is_identical=True, lag_s=0.1):
    times = {"write_s": 2.0, "write_cpu_s": 2.1, "carried_cpu_s": 0.2, "compute_s": 2.0, "compute_cpu_s": 2.0}
    found = {"carrier": carrier, "repeat": repeat, "carried_s": carried_s, "carried_stall_s": 0.0, "lag_s": lag_s}
    return {**times, **found, "carried_tokens": tokens, "is_identical": is_identical}


def killed(carrier, who, tokens, *, is_identical=True):
    told = {"carrier": carrier, "killed": who, "took_s": 1.0, "carried_tokens": tokens}
    return {**told, "is_identical": is_identical}


def alone(carrier, delay_s, token_share):
    return {"carrier": carrier, "delay_s": delay_s, "token_share": token_share, "is_identical": True}


WHERE = {
    "provenance": {"commit": "0123456789", "date": "2026-11-24"}
    | {"hardware": {"cpu_model": "A processor", "num_cores": 2}}
}
ROWS = [
    row("page_server", 0, 1.0),
    row("page_server", 0, 0.6),
    row("page_server", 1, 0.2),
    row("mooncake", 0, 1.6),
    row("mooncake", 1, 0.1),
]


def summary(rows=ROWS, lone=(), dead=()):
    return summarise(rows, lone, dead, TAKEN, 100)


def test_summary_when_repeats_differ_then_ratios_are_within_each():
    found = summary()["carriers"]
    assert found["page_server"]["ttft_ratio"]["values"] == pytest.approx([0.4, 0.1])
    assert found["mooncake"]["page_server_ratio"]["values"] == pytest.approx([0.5, 2.0])
    assert found["page_server"]["page_server_ratio"]["values"] == [1.0, 1.0]
    assert found["mooncake"]["memory_bytes_per_page"] == 1000.0 and found["page_server"]["memory_bytes_per_page"] == 0


def test_summary_when_a_prompt_was_late_or_did_not_come_then_the_worst_shows():
    rows = [*ROWS, row("page_server", 1, 0.2, tokens=0, lag_s=3.0)]
    page_server = summary(rows)["carriers"]["page_server"]
    assert (
        page_server["lag_s"]["max"] == 3.0
        and page_server["lag_s"]["median"] == 0.1
        and page_server["least_token_share"] == 0
    )


@pytest.mark.parametrize("dead", [[], [killed("page_server", "writer", 0, is_identical=False)]])
def test_summary_when_any_answer_differs_then_outputs_are_not_identical(dead):
    found = summary(dead=dead)
    assert found["outputs_identical"] == (not dead) and found["num_compared"] == len(ROWS) + len(dead)


def test_summary_when_servers_were_killed_then_by_who_it_was():
    dead = [killed("page_server", "writer", 0), killed("mooncake", "writer", 96), killed("mooncake", "lender", 0)]
    found = summary(dead=dead)["carriers"]
    assert found["page_server"]["killed"] == {
        "writer": {"num_asked": 1, "num_right": 1, "took_s": [1.0], "token_shares": [0.0]}
    }
    assert [one["token_shares"] for one in found["mooncake"]["killed"].values()] == [[0.96], [0.0]]


def test_summary_when_the_writer_was_left_alone_then_by_how_long():
    lone = [alone("page_server", 1.5, 0.96), alone("page_server", 0.0, 0.0), alone("page_server", 1.5, 0.0)]
    found = summary(lone=lone)["carriers"]["page_server"]["alone"]
    assert list(found) == ["0", "1.5"] and found["1.5"]["values"] == [0.96, 0.0]


class FakeEngine:
    def __init__(self, done, name):
        self._done, self._name = done, name

    def generate(self, ids, *, num_tokens=1, **asked):
        what = "compute" if asked else "ask"
        self._done.append(f"{self._name} {what} {num_tokens}")
        return {"output_ids": [7], "meta_info": {"cached_tokens_details": None if asked else {"storage": 48}}}

    def ranks(self):
        return {0: {"wait_us": 0}}


class FakePair:
    """All that is written can be had at the third look."""

    def __init__(self, holders=()):
        self.done = []
        self.writer, self.reader = FakeEngine(self.done, "writer"), FakeEngine(self.done, "reader")
        kills = {name: lambda name=name: self.done.append(f"kill {name}") for name in holders}
        self.carrier = SimpleNamespace(
            name="mooncake", source="storage", holders=lambda: kills, taken=lambda pair: Taken(memory_bytes=1.0)
        )
        self._looks = 0

    def cpu_s(self):
        return 0.0

    def num_to_be_had(self):
        self._looks += 1
        return 100 if self._looks % 3 == 0 else 0

    def until(self, condition, poll_s):
        while not condition():
            pass

    def kill_writer(self):
        self.done.append("kill writer")

    def awake(self):
        self.done.append("awake")

    def asleep(self):
        self.done.append("asleep")


@pytest.mark.parametrize("number, order", [(0, ["compute", "ask"]), (1, ["ask", "compute"])])
def test_prompt_when_its_number_is_odd_then_carried_first(number, order):
    pair = FakePair()
    found = remote_carriers.measure_prompt(pair, list(range(64)), 0, number)
    assert [line.split()[1] for line in pair.done if line.startswith("reader")][:2] == order
    assert found["carried_tokens"] == 48 and found["is_identical"] and found["compute_s"] > 0


def test_killed_when_others_hold_the_bytes_then_they_are_killed_after_the_writer():
    pair = FakePair(holders=["lender"])
    asked = [list(range(64))] * (2 * remote_carriers.NUM_AFTER_KILL)
    rows = remote_carriers.measure_killed(pair, asked)
    assert [row["killed"] for row in rows] == ["writer", "writer", "lender", "lender"]
    first, second = pair.done.index("kill writer"), pair.done.index("kill lender")
    assert "reader ask 1" not in pair.done[:first] and pair.done[first:second].count("reader ask 1") == 2


def test_killed_when_nobody_else_holds_the_bytes_then_no_prompt_is_written_for_it():
    pair = FakePair()
    rows = remote_carriers.measure_killed(pair, [list(range(64))] * (2 * remote_carriers.NUM_AFTER_KILL))
    assert len(rows) == pair.done.count("writer ask 1") == remote_carriers.NUM_AFTER_KILL


def test_measure_when_pairs_take_turns_then_one_is_awake_and_the_first_rotates(monkeypatch, tmp_path):
    log = []
    pairs = {}
    for name in KINDS:
        pairs[name] = pair = FakePair(["lender"] if name == "mooncake" else [])
        pair.carrier.name = name
        pair.awake = lambda name=name: log.append(name)
        pair.asleep = lambda: log.append("")
    monkeypatch.setattr(remote_carriers, "_started", lambda name, *rest: pairs[name])
    monkeypatch.setattr(remote_carriers, "prompts", lambda model, lengths, *, seed: [[0] * size for size in lengths])
    monkeypatch.setattr(remote_carriers, "DELAYS_S", (0.0, 0.01))
    found = remote_carriers.measure(tmp_path, tmp_path, 2, 0)
    first, *others = KINDS
    assert log[::2] == [*KINDS, *others, first, *KINDS] and not any(log[1::2])
    num_turns = 2 * len(KINDS)
    assert len(found["rows"]) == num_turns * remote_carriers.NUM_PROMPTS and len(found["alone_rows"]) == num_turns * 2
    assert found["outputs_identical"] and list(found["carriers"]["mooncake"]["killed"]) == ["writer", "lender"]
    assert carriers_page.page(found | WHERE)


def test_gauge_when_names_begin_alike_then_the_whole_name_counts():
    metrics = "# TYPE held gauge\nheld_more 1\nheld 2.5\n"
    assert mooncake.gauge(metrics, "held") == 2.5
    with pytest.raises(LookupError, match="no gone"):
        mooncake.gauge(metrics, "gone")
