# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

from banyan import _native
from banyan.layout import Layout, MemberSlots
from banyan.sglang_plugin.rank.reporting import figures as module
from banyan.sglang_plugin.rank.reporting.figures import RankFigures
from banyan.sglang_plugin.rank.reporting.residency_report import COUNT_PERIOD_S, ResidencyReport
from banyan.telemetry import PAGE_BYTES, Copies, NodeReuse, PromptAnswer, gauges_of

PAGE = 16
IN_BOTH, IN_ONE = Copies(100, 100, 100.0), Copies(100, 0, 100.0)


def test_store_when_a_model_has_pages_of_two_kinds_then_what_is_wrong_with_either_is_told():
    """Alerts, `banyan top` and the page look at one store of a rank."""

    def kind(**stats):
        return SimpleNamespace(store_figures=lambda: {"store": stats, "store_write_bytes_per_day": 10})

    figures = RankFigures.__new__(RankFigures)
    full = kind(checksum_failures=0, written_bytes=5, is_stopped=1)
    figures._kinds = SimpleNamespace(full=full, beside=(kind(checksum_failures=2, written_bytes=3, is_stopped=1),))
    assert gauges_of(figures._stores()) == {
        **{"store_checksum_failures": 2, "store_written_bytes": 8, "store_is_stopped": 1},
        "store_write_bytes_per_day": 20,
    }


def test_curve_when_pages_lay_in_pool_and_arena_but_for_the_last_moment_then_the_node_had_no_room_for_twice_as_many(
    monkeypatch,
):
    """150 pages, over and over: a pool and an arena of 100 each found none of them while they held the same."""
    now_s = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    member_slots = MemberSlots(Layout(dp=1, attn_dp=1, attn_cp=1, attn_tp=1), 0, 0)
    report = ResidencyReport(_native.RankTable.create(2), member_slots, PAGE)
    report.joined(b"n" * 32)
    held = IN_BOTH
    report._sample = SimpleNamespace(look=lambda holders: held)
    reuse = NodeReuse(PAGE, 200, 7, lambda: now_s)
    full = SimpleNamespace(residency_report=report, figures=dict, store_figures=dict, pools=None)
    kinds = SimpleNamespace(full=full, beside=(), node_pages=(100, 100))
    pages = b"".join((number << 1).to_bytes(PAGE_BYTES, "little") for number in range(1, 151))
    parts = SimpleNamespace(
        kinds=kinds,
        demand=SimpleNamespace(hear=lambda: None),
        reuse=reuse,
        setup=SimpleNamespace(page_tokens=PAGE, counters=None, carried={"server": "s"}),
        **dict.fromkeys(("planner", "dropped")),
        began_s=0.0,
    )
    rank = RankFigures(parts)
    monkeypatch.setattr(RankFigures, "_room", lambda self: {})
    for _ in range(10):
        for at in range(0, len(pages), PAGE_BYTES):
            reuse.asked(pages[at : at + PAGE_BYTES])
            report.asked(1)
        reuse.answered(PromptAnswer(150 * PAGE, 150, pages))
        now_s += COUNT_PERIOD_S
    held = IN_ONE
    told = rank.gauges()
    assert told["duplicate_share"] == 0.0, "now: the node would hold 200"
    assert told["hit_share_same"] == 0.0
    assert told["hit_share_double"] > 0.8, "as they would in an arena of 200"
