# SPDX-License-Identifier: Apache-2.0
import re

import pytest

from banyan.telemetry import SERIES


@pytest.mark.parametrize("name", SERIES)
def test_series_when_it_is_named_then_as_prometheus_has_it(name):
    series = SERIES[name]
    assert re.fullmatch(r"banyan:[a-z][a-z_0-9]*", series.name) and series.text
    assert series.name.endswith("_total") == series.is_counter
    assert not re.search(r"_(us|ms|kb|mb|gb)(_|$)", series.name)


def test_series_when_all_are_listed_then_no_two_have_one_name():
    names = [series.name for series in SERIES.values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "shown", "scale"),
    [
        ("copy_us", "banyan:copy_seconds_total", 1e-6),
        ("fetched_bytes", "banyan:fetched_bytes_total", 1.0),
        ("num_failures", "banyan:failures_total", 1.0),
        ("num_free_pages", "banyan:num_free_pages", 1.0),
        ("store_written_bytes", "banyan:store_written_bytes_total", 1.0),
    ],
)
def test_series_when_a_figure_is_shown_then_its_unit_is_a_base_unit(name, shown, scale):
    assert (SERIES[name].name, SERIES[name].scale) == (shown, scale)
