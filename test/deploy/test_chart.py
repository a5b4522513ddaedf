# SPDX-License-Identifier: Apache-2.0
"""What the chart says of servers that lend to each other, and of tenants: what could not work is refused before."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest
import yaml
from test.deploy import chart

from banyan import config
from banyan.refusals.combinations import combination_refusal

pytestmark = pytest.mark.skipif(not shutil.which("helm"), reason="no helm")


@pytest.mark.parametrize("values", ["server.listen=0.0.0.0:7400", "server.peers=a:7400"])
def test_servers_that_lend_when_no_secret_is_named_then_the_chart_says_which_value(values):
    with pytest.raises(RuntimeError, match=r"server\.secretName"):
        chart.rendered(values)
    assert "secret-file" in chart.rendered(f"{values},server.secret-file=/models/secret")


@pytest.mark.parametrize(
    "values", ["server.tenant-secret-file=/models/secret", "router.settings.tenants-file=/models/tenants.toml"]
)
def test_tenants_when_the_charts_router_would_have_to_know_them_then_the_chart_says_what_to_do(values):
    with pytest.raises(RuntimeError, match=r"cannot serve tenants.*router\.enabled=false"):
        chart.rendered(values)
    alone = chart.rendered("server.tenant-secret-file=/models/secret,router.enabled=false")
    assert 'banyan-tenant-secret-file: "/models/secret"' in alone


def test_servers_that_lend_when_a_secret_is_named_then_they_take_their_flags_and_nobody_else_reads_it():
    documents = chart.documents(chart.rendered(chart.VALUES["servers that lend"]))
    flags = yaml.safe_load(documents["ConfigMap", "banyan"]["data"]["server.yaml"])
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    taken = config.take_flags(parser.parse_args(["--enable-banyan", *words]))
    assert combination_refusal(taken) is None
    spec = documents["StatefulSet", "banyan"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (volume,) = (volume for volume in spec["volumes"] if "secret" in volume)
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == volume["name"])
    assert volume["secret"] == {"secretName": "nodes", "defaultMode": 0o400}
    assert Path(taken.secret_file) == Path(mount["mountPath"]) / "secret" and mount["readOnly"]
    assert container["securityContext"]["runAsUser"] == 0
