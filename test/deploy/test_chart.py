# SPDX-License-Identifier: Apache-2.0
"""Flags become arguments of the pods; what could not work is refused before."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest
from test.deploy import chart

from banyan import config
from banyan.refusals.combinations import combination_refusal

pytestmark = pytest.mark.skipif(not shutil.which("helm"), reason="no helm")
ROUTER, SERVERS = ("Deployment", "banyan-router"), ("StatefulSet", "banyan")


def pod(values):
    """Of a server."""
    return chart.documents(chart.rendered(values))[SERVERS]["spec"]["template"]["spec"]


def arguments(values, kind=SERVERS):
    return chart.arguments(chart.documents(chart.rendered(values))[kind])


@pytest.mark.parametrize(("values", "kind"), [("server.host-gb=9", SERVERS), ("router.settings.policy=level", ROUTER)])
def test_flags_when_an_upgrade_changes_one_then_pods_that_are_not_yet_upgraded_keep_theirs(values, kind):
    """What a pod reads from an object beside it changes under it, at the next start of its container."""
    documents = chart.documents(chart.rendered(values))
    assert not [name for name in documents if name[0] == "ConfigMap"]
    assert f"--{'banyan-' * (kind == SERVERS)}{values.rpartition('.')[2]}" in chart.arguments(documents[kind])


def test_flags_when_they_are_switches_or_off_then_as_the_programs_take_them():
    said = arguments("server.log-json=true,server.tell-lines=false,server.share=false,server.host-gb=0")
    assert {"--banyan-log-json", "--banyan-share=false", "--banyan-host-gb=0"} < set(said)
    assert not [word for word in said if "tell-lines" in word]
    assert {"--log-json", "--port=30100"} < set(arguments("router.settings.log-json=true", ROUTER))


def test_flags_when_the_user_says_the_same_as_the_chart_then_the_users_win():
    said = arguments("server.share=index,arguments[0]=--banyan-share=off")
    assert (
        said.index("--banyan-store=/store/kv") < said.index("--banyan-share=index") < said.index("--banyan-share=off")
    )


def test_pods_when_a_registry_wants_a_key_and_weights_take_an_hour_then_the_values_say_so():
    documents = chart.documents(chart.rendered(chart.VALUES["a registry with a key, a runtime of its own"]))
    server, router = (documents[kind]["spec"]["template"]["spec"] for kind in (SERVERS, ROUTER))
    for spec in (server, router):
        assert spec["imagePullSecrets"] == [{"name": "key"}] and spec["containers"][0]["imagePullPolicy"] == "Always"
    assert server["runtimeClassName"] == "nvidia" and "runtimeClassName" not in router
    probe = server["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3600


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
    assert "--banyan-tenant-secret-file=/models/secret" in alone


@pytest.mark.parametrize(
    ("values", "way_out"),
    [
        ("server.store=/x", "store.enabled=false"),
        ("server.store-gb=9", "store.sizeGb"),
        ("server.keep-host-arena=/x,keptArena.hostPath=/dev/shm/banyan", "keptArena.hostPath alone"),
        ("server.secret-file=/x,server.secretName=nodes", "drop one"),
        ("router.settings.host=::1", "drop them"),
        ("router.settings.port=80", "drop them"),
    ],
)
def test_flag_when_the_chart_says_it_itself_then_it_names_the_value_and_the_way_out(values, way_out):
    with pytest.raises(RuntimeError, match=rf"{values.partition('=')[0]}.*: .*{way_out}"):
        chart.rendered(values)


@pytest.mark.parametrize(
    ("values", "way_out"),
    [
        ("image=registry:5000/banyan:0.1-cpu", r"resources.limits: .*nvidia.com/gpu: null"),
        ("image=banyan:cpu.2@sha256:0a", r"resources.limits: .*nvidia.com/gpu: null"),
        ("arguments[0]=--smg-grpc-mode", "--smg-grpc-mode: .* drop it"),
        ("arguments[0]=--port=31000", "--port, --host: .*drop them"),
        ("arguments[0]=--api-key=k", "--api-key: .*router.enabled=false"),
        ("arguments[0]=--api-key,arguments[1]=k", "--api-key: .*router.enabled=false"),
    ],
)
def test_values_when_they_cannot_work_together_then_the_chart_names_them_and_the_way_out(values, way_out):
    with pytest.raises(RuntimeError, match=way_out):
        chart.rendered(values)


@pytest.mark.parametrize(
    "values",
    [
        r"image=banyan:cpu,resources.limits.nvidia\.com/gpu=0",
        "image=banyan:gpu-cpuoffload",
        "image=mirror-cpu.local:5000/banyan-cpu-too:gpu",
    ],
)
def test_image_when_it_is_not_for_cpus_or_no_gpu_is_asked_for_then_it_is_taken(values):
    assert chart.rendered(values)


def test_routers_pod_when_it_starts_then_its_first_process_is_not_python():
    """As process 1 it would miss a SIGTERM during its start; a command takes the place of the image's entrypoint."""
    (container,) = chart.documents(chart.rendered(""))[ROUTER]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["tini", "--", "banyan", "route"]


def test_server_when_it_is_on_a_cpu_then_it_asks_for_no_gpu():
    spec = pod(chart.VALUES["servers without GPUs"])
    assert spec["containers"][0]["resources"]["limits"] == {"memory": "96Gi"}
    assert "--api-key=k" in arguments("arguments[0]=--api-key=k,router.enabled=false")


@pytest.mark.parametrize(("size_gb", "expected"), [(1, "1127Mi"), (200, "225400Mi")])
def test_store_of_a_pod_when_it_is_small_then_its_volume_still_has_room_beside_the_quota(size_gb, expected):
    volume = {"name": "store", "emptyDir": {"sizeLimit": expected}}
    assert volume in pod(f"store.hostPath=,store.sizeGb={size_gb}")["volumes"]


def test_store_when_the_chart_has_none_then_a_users_own_is_taken():
    assert "--banyan-store=3fs:///kv" in arguments("store.enabled=false,server.store=3fs:///kv")


def test_servers_that_lend_when_a_secret_is_named_then_they_take_their_flags_and_nobody_else_reads_it():
    documents = chart.documents(chart.rendered(chart.VALUES["servers that lend"]))
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    flags, _ = parser.parse_known_args(["--enable-banyan", *chart.arguments(documents[SERVERS])])
    taken = config.take_flags(flags)
    assert combination_refusal(taken) is None
    spec = documents[SERVERS]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (volume,) = (volume for volume in spec["volumes"] if "secret" in volume)
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == volume["name"])
    assert volume["secret"] == {"secretName": "nodes", "defaultMode": 0o400}
    assert Path(taken.secret_file) == Path(mount["mountPath"]) / "secret" and mount["readOnly"]
    assert container["securityContext"]["runAsUser"] == 0
