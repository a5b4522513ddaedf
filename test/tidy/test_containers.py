# SPDX-License-Identifier: Apache-2.0
"""What is in ``deploy/``: linted, validated against the schemas of Kubernetes, and in step with the product."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft7Validator

from banyan import SGLANG_VERSION, __version__, config
from banyan.router import settings
from banyan.router.app import build
from benchmark.servers import cpu_env

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "banyan"
MANIFESTS = DEPLOY / "kubernetes" / "banyan.yaml"
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
OLDEST, NEWEST = "1.27", "1.35"


def documents():
    return [one for one in yaml.safe_load_all(MANIFESTS.read_text()) if one]


def one(kind, component=None):
    """The document of a kind, and of a component where there are several."""
    (found,) = (
        document
        for document in documents()
        if document["kind"] == kind and (component is None or component in document["metadata"]["name"])
    )
    return found


def pod(document):
    spec = document["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfile_when_it_is_linted_then_nothing_is_said(path):
    lint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([lint, "--failure-threshold", "info", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfile_when_it_copies_then_the_files_are_there(path):
    copied = re.findall(r"^COPY (?!--from)(\S+) ", path.read_text(), re.MULTILINE)
    assert copied and all((ROOT / name).exists() for name in copied)
    assert len(DOCKERFILES) == 2


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_image_when_its_server_is_told_to_end_or_loses_a_rank_then_it_is_not_the_first_process(path):
    """Of that one the kernel drops every signal without a handler, and every SIGKILL."""
    (line,) = re.findall(r"^ENTRYPOINT (.*)$", path.read_text(), re.MULTILINE)
    assert json.loads(line)[:2] == ["tini", "--"] and "tini" in path.read_text().partition("ENTRYPOINT")[0]


def test_cpu_image_when_it_serves_then_without_amx_as_what_is_measured_here():
    (line,) = re.findall("^ENV (SGLANG.*)$", (DEPLOY / "docker" / "cpu.Dockerfile").read_text(), re.MULTILINE)
    variables = dict(word.split("=") for word in line.split())
    assert variables.items() <= dict(cpu_env(dp=1)).items() and "ONEDNN_MAX_CPU_ISA" in variables


def test_image_when_it_is_chosen_then_it_is_of_the_release_that_banyan_is_for():
    assert f":v{SGLANG_VERSION}\n" in (DEPLOY / "docker" / "gpu.Dockerfile").read_text()


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_manifests_when_validated_then_kubernetes_takes_them_and_knows_every_field(version):
    kinds = [document["kind"] for document in documents()]
    assert sorted(kinds) == ["Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service", "Service", "StatefulSet"]
    for document in documents():
        kubernetes_validate.validate(document, version, strict=True)


def test_manifests_when_the_chart_has_changed_then_they_were_rendered_again():
    content = b"".join(path.read_bytes() for path in sorted(CHART.rglob("*"), key=str) if path.is_file())
    assert MANIFESTS.read_text().partition("\n")[0].endswith(f"Chart: {hashlib.sha256(content).hexdigest()[:16]}"), (
        "run `make manifests`"
    )


def test_values_when_looked_at_then_they_keep_their_schema_and_templates_use_each():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    Draft7Validator.check_schema(schema)
    assert list(Draft7Validator(schema).iter_errors(values)) == []
    assert list(Draft7Validator(schema).iter_errors({**values, "nodes": 0}))
    used = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert [name for name in values if f".Values.{name}" not in used] == []
    assert {name.split(".")[0] for name in re.findall(r"\.Values\.([\w.]+)", used)} <= set(values)


def test_chart_when_its_version_is_read_then_it_is_the_product_s():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def test_arguments_when_they_are_read_as_a_server_and_a_router_would_then_they_are_well():
    servers = one("StatefulSet")
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    _, server = pod(servers)
    flags, _ = parser.parse_known_args(["--enable-banyan", *server["args"]])
    taken = config.take_flags(flags)
    assert (taken.host_gb, taken.store, taken.store_gb) == (32.0, ("/store/kv",), 200.0)
    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    names = [
        f"http://{servers['metadata']['name']}-{number}.{servers['spec']['serviceName']}:30000"
        for number in range(servers["spec"]["replicas"])
    ]
    _, router = pod(one("Deployment"))
    routed = settings.take_flags(parser.parse_args(router["args"]))
    assert list(routed.servers) == names and len(names) == 2 and routed.port == 30100


def test_servers_when_they_are_placed_then_one_on_each_node_in_no_namespace_of_the_host():
    spec, container = pod(one("StatefulSet"))
    (rule,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = one("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"]["matchLabels"].items() <= labels.items()
    assert not spec["hostPID"] and not spec["hostIPC"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    for mounted in container["volumeMounts"]:
        assert mounted["name"] in {volume["name"] for volume in spec["volumes"]}
    (shared,) = (volume for volume in spec["volumes"] if volume["name"] == "shared-memory")
    assert shared["emptyDir"]["medium"] == "Memory" and shared["emptyDir"]["sizeLimit"]


def test_probes_when_sglang_is_well_then_its_answer_is_waited_for():
    """It sleeps a second before it looks whether its engine has made a token; one second is Kubernetes' default."""
    _, container = pod(one("StatefulSet"))
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        # A patch of the release that an image is made of: test_image_when_it_is_chosen above.
        assert container[name]["httpGet"]["path"] == "/health_ranks" and container[name]["timeoutSeconds"] >= 3, name


def test_routers_pod_when_its_router_is_only_busy_then_it_is_left_alone():
    """And while no server is up, which /health would say."""
    _, container = pod(one("Deployment"))
    probe = container["livenessProbe"]
    app, _ = build(settings.Settings(servers=("http://a:1",)))
    assert probe["httpGet"]["path"] == "/metrics" in {route.path for route in app.routes}
    assert probe["timeoutSeconds"] >= 10 and probe["periodSeconds"] * probe["failureThreshold"] >= 300


def test_routers_pod_when_a_namespace_is_restricted_then_it_may_run_there():
    spec, container = pod(one("Deployment"))
    security = container["securityContext"]
    assert security["runAsNonRoot"] and security["runAsUser"] > 0 and not security["allowPrivilegeEscalation"]
    assert security["seccompProfile"] == {"type": "RuntimeDefault"} and security["capabilities"] == {"drop": ["ALL"]}
    assert all("emptyDir" in volume for volume in spec["volumes"])


EVENT_PORTS = {"port": 5557, "endPort": 5856}
"""Nobody else than routers may listen to events, and these may where a user's own flags turn them on."""


def test_policy_when_it_admits_then_routers_alone_to_the_ports_of_servers():
    policy = one("NetworkPolicy")["spec"]
    labels = {
        kind: one(kind)["spec"]["template"]["metadata"]["labels"].items() for kind in ("StatefulSet", "Deployment")
    }
    (rule,) = policy["ingress"]
    (admitted,) = (peer["podSelector"]["matchLabels"].items() for peer in rule["from"])
    assert policy["podSelector"]["matchLabels"].items() <= labels["StatefulSet"] and admitted <= labels["Deployment"]
    assert not admitted <= labels["StatefulSet"] and policy["policyTypes"] == ["Ingress"]
    _, container = pod(one("StatefulSet"))
    assert rule["ports"] == [*({"port": port["containerPort"]} for port in container["ports"]), EVENT_PORTS]


def test_servers_when_nodes_are_drained_then_one_at_a_time_and_those_that_are_not_well_at_once():
    budget = one("PodDisruptionBudget")["spec"]
    assert budget.pop("selector") == one("StatefulSet")["spec"]["selector"]
    assert budget == {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow"}


def test_pods_when_they_end_or_start_then_as_the_programs_in_them_expect():
    router, _ = pod(one("Deployment"))
    assert router["terminationGracePeriodSeconds"] > settings.Settings(servers=("http://a:1",)).drain_timeout_s
    for kind in ("StatefulSet", "Deployment"):
        spec, _ = pod(one(kind))
        assert spec["enableServiceLinks"] is spec["automountServiceAccountToken"] is False, kind


@pytest.mark.parametrize(("kind", "component"), [("StatefulSet", "banyan"), ("Deployment", "router")])
def test_services_when_they_select_then_it_is_the_pods_of_their_port(kind, component):
    workload = one(kind)
    _, container = pod(workload)
    labels = workload["spec"]["template"]["metadata"]["labels"]
    selecting = [
        document
        for document in documents()
        if document["kind"] == "Service" and document["spec"]["selector"].items() <= labels.items()
    ]
    assert len(selecting) == 1
    (port,), (exposed,) = selecting[0]["spec"]["ports"], container["ports"]
    assert port.get("targetPort", port["port"]) in (exposed["name"], exposed["containerPort"])
