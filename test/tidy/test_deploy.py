# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/: queries that Prometheus understands, of metrics that exist, in a dashboard that Grafana loads.

That a real server exposes them is seen in ``test/e2e/test_tiers.py``. `make setup` installs promtool.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import yaml

from banyan.observe.alerts import RULES
from banyan.router.metrics import Metrics
from banyan.telemetry import SERIES

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "banyan.json").read_text())
RULE_FILE = DEPLOY / "prometheus" / "banyan-alerts.yml"
WORDS = re.compile(r"\bbanyan(?::|_)\w+")
RANK_METRICS = {series.name for series in SERIES.values()}


def rules():
    return [rule for group in yaml.safe_load(RULE_FILE.read_text())["groups"] for rule in group["rules"]]


def panels():
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries():
    return [target["expr"] for panel in panels() for target in panel["targets"]] + [rule["expr"] for rule in rules()]


def promtool(*words):
    tool = shutil.which("promtool")
    assert tool, "no promtool: `make setup` installs Debian's package prometheus"
    done = subprocess.run([tool, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_queries_when_they_name_a_metric_then_a_rank_or_a_router_has_it():
    router = {line.split()[2] for line in Metrics().render([], 0).decode().splitlines() if line.startswith("# TYPE")}
    router |= {f"{name}_bucket" for name in router}
    for query in queries():
        assert WORDS.findall(query), query
        assert set(WORDS.findall(query)) <= RANK_METRICS | router, query


def test_alerts_when_promtool_reads_them_then_they_are_rules_with_a_way_out():
    promtool("check", "rules", str(RULE_FILE))
    assert {rule.name for rule in RULES} < {rule["alert"] for rule in rules()}
    assert all(rule["annotations"]["summary"] and rule["annotations"]["description"] for rule in rules())


def test_alerts_when_series_say_that_something_is_wrong_then_they_fire_and_otherwise_not(tmp_path):
    def case(series, alert, fires, at="30m"):
        of_rank = {f'{SERIES[name].name}{{dp_rank="0", instance="i"}}': values for name, values in series.items()}
        return fired(of_rank, alert, at, *([{"dp_rank": "0", "instance": "i"}] if fires else []))

    cases = [
        case({"fetches_failed": "0x27 1x3", "fetches": "0+1x30"}, "BanyanFetchFailed", True),
        case({"fetches_failed": "0x27 1x3", "fetches": "0+100x30"}, "BanyanFetchFailed", False),
        case({"store_checksum_failures": "0x27 1x3"}, "BanyanPageDamaged", True),
        case({"num_failures": "_x28 1x3", "up_s": "_x28 60+60x3"}, "BanyanFault", True),
        case({"num_failures": "1x30", "up_s": "6000+60x30"}, "BanyanFault", False),
        case({"num_failures": "1x9 _x12 1x10", "up_s": "6000+60x30"}, "BanyanFault", False),
        case({"num_live_ranks": "1x30", "num_ranks": "2x30"}, "BanyanRankGone", True),
        case({"num_live_ranks": "2x30", "num_ranks": "2x30"}, "BanyanRankGone", False),
        case({"num_quarantined_pages": "60x30", "num_pool_pages": "375x30"}, "BanyanQuarantine", True),
        case({"num_quarantined_pages": "6x30", "num_pool_pages": "375x30"}, "BanyanQuarantine", False),
        case({"wait_us": "0+20x30", "forward_us": "0+50x30"}, "BanyanLayersWait", True),
        case({"wait_us": "0+2x30", "forward_us": "0+50x30"}, "BanyanLayersWait", False),
        case({"alloc_wait_us": "0+3x30"}, "BanyanAllocationWaits", True),
        case({"alloc_wait_us": "0+0.3x30"}, "BanyanAllocationWaits", False),
        case(
            {"archive_over_budget_pages": "0+2x60", "archived_pages": "0+100x60"}, "BanyanStoreBudgetSpent", False, "1h"
        ),
        case(
            {"archive_over_budget_pages": "0+30x90", "archived_pages": "0+100x90"},
            "BanyanStoreBudgetSpent",
            True,
            "90m",
        ),
        case({"control_us": "0+6x30"}, "BanyanCost", True),
        case({"control_us": "0+0.24x30", "forward_us": "0+0.001x30"}, "BanyanCost", False),
        case({"store_is_stopped": "0x20 1x10"}, "BanyanStoreStopped", True),
        case({"fetches_refused": "0+100x30", "fetches": "0+100x30"}, "BanyanFetchesRefused", True),
        case({"fetches_refused": "0+1x30", "fetches": "0+100x30"}, "BanyanFetchesRefused", False),
    ]
    try_rules(tmp_path, cases)


def fired(series, alert, at, *labels):
    """A case of promtool's: with these series, the alert fires at that time once for each of ``labels``, whose values
    are all that its words name."""
    (rule,) = (rule for rule in rules() if rule["alert"] == alert)
    expected = [
        {
            "exp_labels": {**one, **rule["labels"]},
            "exp_annotations": {name: filled_in(text, one) for name, text in rule["annotations"].items()},
        }
        for one in labels
    ]
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": expected}],
    }


def filled_in(text, labels):
    return re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], text)


def try_rules(folder, cases):
    asked = folder / "tests.yml"
    asked.write_text(yaml.safe_dump({"rule_files": [str(RULE_FILE)], "evaluation_interval": "1m", "tests": cases}))
    promtool("test", "rules", str(asked))


def test_alert_when_a_server_is_gone_then_it_fires_until_that_one_is_back_or_a_while_has_passed(tmp_path):
    ranks = [f'{SERIES["num_ranks"].name}{{dp_rank="{rank}", instance="%s"}}' for rank in (0, 1)]
    values = {"dead": "2x20 stale", "restarted": "2x20 stale _x4 2x40", "well": "2x60"}
    series = {rank % instance: told for instance, told in values.items() for rank in ranks}
    gone = {"20m": (), "23m": ("dead", "restarted"), "30m": ("dead",), "40m": ()}
    try_rules(
        tmp_path,
        [fired(series, "BanyanServerGone", at, *({"instance": one} for one in those)) for at, those in gone.items()],
    )


def test_alert_when_a_rank_stands_still_then_it_fires_for_its_server_whichever_rank_shows_anything(tmp_path):
    series = {f'{SERIES["num_silent_ranks"].name}{{instance="i"}}': "0x10 1x20"}
    fires = {"10m": (), "30m": ({"instance": "i"},)}
    try_rules(tmp_path, [fired(series, "BanyanRankSilent", at, *those) for at, those in fires.items()])


def test_alerts_when_a_router_has_no_place_or_no_answer_then_their_words_name_a_server_where_there_is_one(tmp_path):
    server = {"instance": "i", "server": "http://a:1"}
    try_rules(
        tmp_path,
        [
            fired({'banyan_router_waiting{instance="i"}': "3x30"}, "BanyanRouterQueue", "30m", {"instance": "i"}),
            fired({'banyan_router_waiting{instance="i"}': "0x30"}, "BanyanRouterQueue", "30m"),
            fired(
                {'banyan_router_server_up{instance="i", server="http://a:1"}': "0x30"},
                "BanyanRouterServerDown",
                "30m",
                server,
            ),
        ],
    )


def test_dashboard_when_promtool_reads_its_queries_then_all_are_understood(tmp_path):
    said = [query.replace("$__rate_interval", "5m").replace("$instance", ".*") for query in queries()]
    assert not [query for query in said if "$" in query]
    recorded = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(said)]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": recorded}]}))
    promtool("check", "rules", str(tmp_path / "queries.yml"))


def test_dashboard_when_a_rank_has_shards_then_what_each_of_them_counts_is_not_added_up():
    counted = {series.name for name, series in SERIES.items() if series.is_counter and not name.endswith("_bytes")}
    for query in (target["expr"] for panel in panels() for target in panel["targets"]):
        for before, name in re.findall(r"(.{0,32})rate\((banyan:\w+)", query):
            assert name not in counted or before.endswith("max by (instance, dp_rank) ("), query


def test_dashboard_when_grafana_loads_it_then_panels_have_ids_places_and_the_chosen_source():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) and DASHBOARD["uid"] and DASHBOARD["schemaVersion"] >= 36
    cells = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        mine = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24 and not mine & cells, panel["title"]
        cells |= mine
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    for panel in panels():
        assert panel["datasource"]["uid"] == "${source}" and panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}
