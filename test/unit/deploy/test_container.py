# SPDX-License-Identifier: Apache-2.0
"""What a container runtime is told of the chart's containers."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from test.deploy.container import Image, Place, num_bytes, oci_seccomp, runtime_config

MANIFESTS = Path(__file__).parents[3] / "deploy" / "kubernetes" / "banyan.yaml"
IMAGE = Image(root="/image", entrypoint=("python", "-m", "server"), env=("A=b",))
VOLUMES = {name: f"/volumes/{name}" for name in ("models", "shared-memory", "store", "temporary")}
PLACE = Place(network="/net", cgroup="/group", hostname="banyan-0", volumes=VOLUMES, files={"/etc/hosts": "/hosts"})


def containers():
    """Those of the chart, by name."""
    documents = [
        one for one in yaml.safe_load_all(MANIFESTS.read_text()) if one["kind"] in ("StatefulSet", "Deployment")
    ]
    found = [one for document in documents for one in document["spec"]["template"]["spec"]["containers"]]
    return {one["name"]: one for one in found}


def config(name, **changed):
    return runtime_config({**containers()[name], **changed}, IMAGE, PLACE, {"defaultAction": "SCMP_ACT_ERRNO"})


def test_server_when_its_container_is_made_then_with_the_image_s_command_the_pod_s_arguments_and_its_volumes():
    made = config("server")
    assert made["process"]["args"][:5] == ["python", "-m", "server", "--model-path", "/models/model"]
    mounts = {mount["destination"]: mount for mount in made["mounts"]}
    assert len(mounts) == len(made["mounts"])
    assert mounts["/dev/shm"]["source"] == "/volumes/shared-memory" and "rw" in mounts["/dev/shm"]["options"]
    assert "ro" in mounts["/models"]["options"] and "rw" in mounts["/store"]["options"]
    assert made["linux"]["resources"]["memory"] == {"limit": 96 << 30}
    assert made["process"]["capabilities"]["permitted"] == ["CAP_IPC_LOCK"] and made["process"]["noNewPrivileges"]
    assert made["linux"]["seccomp"] and {one["type"] for one in made["linux"]["namespaces"]} >= {
        "pid",
        "ipc",
        "network",
    }


def test_router_when_its_container_is_made_then_as_a_user_who_may_write_nothing_but_its_volume():
    made = config("router")
    assert made["process"]["args"] == ["tini", "--", "banyan", "route", *containers()["router"]["args"]]
    assert made["root"]["readonly"] and made["process"]["user"] == {"uid": 1000, "gid": 1000}
    assert made["process"]["capabilities"]["bounding"] == []


@pytest.mark.parametrize("changed", [{"envFrom": []}, {"securityContext": {"privileged": True}}])
def test_container_when_it_has_a_field_that_is_not_known_then_nothing_is_made_of_it(changed):
    with pytest.raises(ValueError, match="not known here"):
        config("server", **changed)


def test_container_when_it_must_not_be_root_and_its_image_is_then_it_is_not_made():
    with pytest.raises(ValueError, match="runAsNonRoot"):
        config("server", securityContext={"runAsNonRoot": True})


def test_profile_when_it_is_put_into_oci_s_words_then_without_io_uring_and_what_capabilities_would_allow():
    rules = [
        {"names": ["read", "io_uring_setup"], "action": "SCMP_ACT_ALLOW", "args": []},
        {"names": ["mount"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
        {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "excludes": {"arches": ["s390x"]}},
        {"names": ["s390_only"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["s390x"]}},
    ]
    made = oci_seccomp({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": rules})
    assert [one["names"] for one in made["syscalls"]] == [["read"], ["clone"]]


@pytest.mark.parametrize(("quantity", "expected"), [("2", 2), (3, 3), ("16Gi", 16 << 30), ("5M", 5_000_000)])
def test_quantity_when_it_is_of_bytes_then_as_kubernetes_counts(quantity, expected):
    assert num_bytes(quantity) == expected


def test_quantity_when_it_is_none_of_bytes_then_refused():
    with pytest.raises(ValueError, match="no quantity"):
        num_bytes("2 apples")
