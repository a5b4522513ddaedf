# SPDX-License-Identifier: Apache-2.0
import re
from dataclasses import replace

import pytest
from test.unit.observe.fake_banyan import FakeBanyan
from test.unit.observe.test_reading import read

from banyan.observe import Looks, Rates
from banyan.observe.alerts import RULES, alerts
from banyan.observe.rates import ALERT_S
from banyan.observe.summary import summary
from banyan.telemetry import SERIES

STORE = {"num_records": 1, "written_pages": 10, "written_bytes": 0}

WRONG = {
    "BanyanRankGone": {"num_live_ranks": 1},
    "BanyanFetchFailed": {"fetches_failed": 1},
    "BanyanThreadEnded": {"threads_ended": 1},
    "BanyanFault": {"num_failures": 1},
    "BanyanChangingLine": {"changing_line_prompts": 1},
    "BanyanPageDamaged": {"store": {**STORE, "checksum_failures": 2}},
    "BanyanStoreReadErrors": {"store": {**STORE, "read_errors": 2}},
    "BanyanStoreStalls": {"store": {**STORE, "stalls": 1}},
    "BanyanStoreStopped": {"store": {**STORE, "is_stopped": 1}},
    "BanyanStoreWriteErrors": {"store": {**STORE, "write_failures": 2, "write_errors": 1}},
    "BanyanStoreFull": {"store": {**STORE, "no_space_pauses": 3}},
    "BanyanStoreCannotGrow": {"store": {**STORE, "floor_refusals": 1}},
    "BanyanStoreBehind": {"store": {**STORE, "put_full": 500, "written_pages": 1000}},
    "BanyanStoreBudgetSpent": {"archive_over_budget_pages": 200, "archived_pages": 1000},
    "BanyanQuarantine": {"num_quarantined_pages": 60},
    "BanyanAllocationWaits": {"alloc_wait_us": 60_000_000},
    "BanyanLayersWait": {"wait_us": 90_000_000, "forward_us": 100_000_000},
    "BanyanFetchesRefused": {"fetches_refused": 50, "fetches": 100},
    "BanyanBackupsDropped": {"backups_dropped_pages": 2000, "backed_up_pages": 3000},
    "BanyanReadsDropped": {"reads_dropped_pages": 2000, "read_pages": 3000},
    "BanyanHotRank": {"placed_hot_avoided": 200, "placed_load": 300},
    "BanyanCost": {"control_us": 60_000_000, "forward_us": 6_000_000_000},
}


def test_alerts_when_a_server_is_well_then_there_are_none():
    server = FakeBanyan()
    server.step()
    assert alerts(Rates(read(server))) == []


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_alert_when_its_condition_holds_at_one_rank_then_it_is_that_rank_and_no_other_alert(name):
    server = FakeBanyan()
    server.more[1] = WRONG[name]
    ((rule, ranks),) = alerts(Rates(read(server)))
    assert (rule.name, ranks) == (name, [1])


def test_alert_when_nobody_looked_for_long_then_of_what_is_counted_it_is_said_since_when():
    server = FakeBanyan()
    server.more[1] = {**WRONG["BanyanFault"], **WRONG["BanyanRankGone"]}
    looks = Looks()

    def since_start():
        return {one["name"]: one["is_since_start"] for one in summary(looks.rates(read(server)))["alerts"]}

    assert since_start() == {"BanyanRankGone": False, "BanyanFault": True}
    server.step(ALERT_S)
    server.more[1]["num_failures"] += 1
    assert since_start() == {"BanyanRankGone": False, "BanyanFault": False}


def test_alert_when_forwards_are_only_launched_as_on_a_gpu_then_a_little_control_time_is_no_cost():
    server = FakeBanyan()
    server.more[1] = {"control_us": 2_400_000, "forward_us": 1_000}
    assert alerts(Rates(read(server))) == []


def test_alert_when_pages_were_given_up_at_a_flush_or_few_writes_fail_then_there_is_none():
    server = FakeBanyan()
    server.more[0] = {"store": {**STORE, "written_pages": 1000, "write_failures": 500, "write_errors": 9}}
    assert alerts(Rates(read(server))) == []


def test_alert_when_what_was_wrong_lies_before_the_last_look_then_it_is_over():
    server = FakeBanyan()
    server.more[0] = {"fetches_failed": 1}
    before = read(server, 1.0)
    assert alerts(Rates(read(server, 3.0), before)) == []


def looked(times_s, values_at=lambda second: {}):
    """What whoever looks at these times can compare, of a rank with such values."""
    looks, now = Looks(), read(FakeBanyan())
    for second in times_s:
        rank = replace(now.ranks[0], up_s=10_000.0 + second, values=values_at(second))
        yield looks, looks.rates(replace(now, taken_s=1e9 + second, ranks=(rank,)))


def alerts_at(times_s, values_at):
    return [[rule.name for rule, _ in alerts(rates)] for _, rates in looked(times_s, values_at)]


def test_alert_when_it_is_looked_every_two_seconds_then_it_is_judged_by_five_minutes():
    def values_at(second):
        # Something failed before anybody looked, and once more; then pages are dropped.
        return {
            "backups_dropped_pages": 5.0 * max(0, second - 3600),
            "backed_up_pages": 1e6 + 10 * second,
            "fetches_failed": 1.0 + (second >= 3600),
        }

    times_s = range(0, 4200, 2)
    told = dict(zip(times_s, alerts_at(times_s, values_at), strict=True))
    assert told[0] == told[298] == ["BanyanFetchFailed"], "since the start"
    assert told[340] == told[3598] == []
    assert told[3600] == told[3798] == ["BanyanFetchFailed"]
    assert told[3898] == ["BanyanFetchFailed", "BanyanBackupsDropped"]
    assert told[4198] == ["BanyanBackupsDropped"]


def test_looks_when_the_clock_is_set_back_or_nobody_looks_then_few_are_kept_and_the_window_heals():
    times_s = [*range(0, 5000, 2), *range(-9000, -5000, 2), 10**6, *range(10**6 + 300, 10**6 + 700, 7)]
    for looks, rates in looked(times_s):
        assert all(len(kept) <= 12 for kept in looks._kept.values()), rates.now.taken_s
    before = rates.over(ALERT_S).before
    assert 300 <= rates.now.taken_s - before.taken_s <= 340
    assert rates.now.ranks[0].prompts and not before.ranks[0].prompts


def test_alerts_when_several_hold_then_critical_ones_come_first():
    server = FakeBanyan()
    server.more[0] = WRONG["BanyanQuarantine"] | WRONG["BanyanPageDamaged"] | WRONG["BanyanFetchFailed"]
    ((first, _), *others) = alerts(Rates(read(server)))
    assert first.name == "BanyanPageDamaged" and len(others) == 2


def test_alerts_when_few_copies_do_not_land_and_no_page_is_damaged_then_there_is_none():
    """As in an hour of `make soak`: pages leave a small store under their readers."""
    server = FakeBanyan()
    server.more[0] = {"fetches_failed": 11, "fetches": 20_000, "read_failed_pages": 134}
    assert alerts(Rates(read(server))) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_query_when_it_names_a_metric_then_ranks_have_it(rule):
    known = {series.name for series in SERIES.values()}
    named = re.findall(r"banyan:\w+", rule.condition.promql())
    assert named and set(named) <= known
