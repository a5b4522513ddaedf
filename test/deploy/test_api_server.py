# SPDX-License-Identifier: Apache-2.0
"""A real API server takes what the chart renders, every field of it, and a namespace's level of Pod Security admits
what docs/deployment.md says."""

from __future__ import annotations

import json
import time

import pytest
import yaml
from test.deploy import api_server, chart

pytestmark = pytest.mark.skipif(bool(api_server.missing()), reason=f"no {', '.join(api_server.missing())}")
LEVELS = ("restricted", "baseline", "privileged")


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory):
    with api_server.cluster(tmp_path_factory.mktemp("kubernetes")) as kubectl:
        for level in LEVELS:
            kubectl.well("create", "namespace", level)
            kubectl.well("label", "namespace", level, f"pod-security.kubernetes.io/enforce={level}")
            # The controllers make it, where they are. Pods of a namespace without one are refused.
            kubectl("create", "serviceaccount", "default", "-n", level)
        yield kubectl


STRICT = ("apply", "--server-side", "--force-conflicts", "--validate=strict", "-n", "privileged", "-f", "-")


def pods(text):
    """The pods that a rendering's controllers would make, by component."""
    for (kind, _), document in chart.documents(text).items():
        if kind in ("StatefulSet", "Deployment"):
            template = document["spec"]["template"]
            labels = template["metadata"]["labels"]
            component = labels["app.kubernetes.io/component"]
            metadata = {"name": component, "labels": labels}
            yield component, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def levels_that_admit(kubectl, pod):
    text = yaml.safe_dump(pod)
    said = {level: kubectl("create", "--dry-run=server", "-n", level, "-f", "-", text=text) for level in LEVELS}
    for done in said.values():
        assert done.returncode == 0 or "violates PodSecurity" in done.stderr, done.stderr
    return {level for level, done in said.items() if done.returncode == 0}


@pytest.mark.parametrize("values", chart.VALUES.values(), ids=chart.VALUES)
def test_rendering_when_it_is_applied_then_the_server_takes_every_field_without_a_warning(kubectl, values):
    done = kubectl(*STRICT, text=chart.rendered(values))
    assert done.returncode == 0 and not done.stderr, done.stderr
    # It says the same of itself again: nothing is changed that was asked for.
    again = kubectl(
        "diff", "--server-side", "--force-conflicts", "-n", "privileged", "-f", "-", text=chart.rendered(values)
    )
    assert again.returncode == 0, again.stdout + again.stderr


def test_manifest_when_it_is_applied_then_the_server_takes_every_field_without_a_warning(kubectl):
    done = kubectl(*STRICT, text=(api_server.ROOT / "deploy/kubernetes/banyan.yaml").read_text())
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_field_that_nobody_knows_when_it_is_applied_then_the_server_refuses_it(kubectl):
    text = chart.rendered("").replace("minReadySeconds:", "minReadySecond:")
    done = kubectl(*STRICT, text=text)
    assert done.returncode != 0 and "minReadySecond" in done.stderr


def test_pods_when_values_are_as_they_are_then_the_servers_need_a_privileged_namespace_and_the_router_none(kubectl):
    admitted = {component: levels_that_admit(kubectl, pod) for component, pod in pods(chart.rendered(""))}
    assert admitted == {"server": {"privileged"}, "router": set(LEVELS)}


def test_pods_when_values_are_those_of_baseline_then_the_servers_are_admitted_there_and_not_to_restricted(kubectl):
    admitted = {component: levels_that_admit(kubectl, pod) for component, pod in pods(chart.rendered(chart.BASELINE))}
    assert admitted == {"server": {"privileged", "baseline"}, "router": set(LEVELS)}


@pytest.mark.skipif(api_server.program("kube-controller-manager") is None, reason="no kube-controller-manager")
def test_controllers_when_the_manifest_is_applied_then_they_make_the_pods_that_the_router_names(kubectl):
    kubectl.well(*STRICT, text=chart.rendered(""))
    until_s = time.monotonic() + 60
    while True:
        found = json.loads(kubectl.well("get", "pods", "-n", "privileged", "-o", "json"))["items"]
        names = {pod["metadata"]["name"] for pod in found}
        if len(names) == 3 or time.monotonic() > until_s:
            break
        time.sleep(0.5)
    assert {"banyan-0", "banyan-1"} < names and len(names) == 3, names
    flags = chart.arguments(chart.documents(chart.rendered(""))["Deployment", "banyan-router"])
    for pod in found:
        spec, name = pod["spec"], pod["metadata"]["name"]
        assert not spec.get("hostPID") and not spec.get("hostIPC")
        if spec.get("subdomain"):
            assert f"--server=http://{spec['hostname']}.{spec['subdomain']}:30000" in flags and name == spec["hostname"]
