# SPDX-License-Identifier: Apache-2.0
from banyan.telemetry import SERIES, gauges_of
from banyan.telemetry.gauges import STORE_GAUGES


def test_gauges_when_there_is_no_store_then_none_of_it():
    assert gauges_of({"num_published_pages": 3, "peers": [], "member_slot": 0}) == {"num_published_pages": 3.0}


def test_gauges_when_the_store_tells_more_then_only_what_is_described_is_shown():
    told = gauges_of({"store": {"backlog_pages": 2, "lookups": 9}})
    assert told == {"store_backlog_pages": 2.0} and "backlog_pages" in STORE_GAUGES


def test_gauges_when_the_cache_was_told_something_then_what_is_kept_and_refused_is_shown():
    told = gauges_of({"told": {"num_pages": 3, "num_refused": 1, "most_pages_of_tenant": 8}})
    assert told == {"told_num_pages": 3.0, "told_num_refused": 1.0, "told_most_pages_of_tenant": 8.0}
    assert SERIES["told_num_refused"].name == "banyan:told_num_refused_total"
