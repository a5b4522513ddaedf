# SPDX-License-Identifier: Apache-2.0
"""What a container runtime is told of a container of the chart: the pod's specification in the words of OCI, as a
kubelet and containerd would say it. Pure, and only as far as the chart goes: an unknown field is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MEMLOCK_BYTES = 8 << 20
"""What systemd gives services, containerd among them, and so containers, unless an administrator says otherwise."""

DEFAULT_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP"),
    *("NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
)
SUFFIXES = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "k": 10**3, "M": 10**6, "G": 10**9}
MASKED = (
    *("/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list"),
    *("/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap"),
)
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
NOT_IO_URING = {"io_uring_setup", "io_uring_enter", "io_uring_register"}
"""Runtimes have taken these out of their default profiles."""

OF_A_CONTAINER = {
    *("name", "image", "command", "args", "env", "ports", "resources", "securityContext", "volumeMounts"),
    *("startupProbe", "readinessProbe", "livenessProbe"),
}
OF_A_SECURITY_CONTEXT = {
    *("runAsNonRoot", "runAsUser", "allowPrivilegeEscalation", "readOnlyRootFilesystem", "seccompProfile"),
    "capabilities",
}


@dataclass(frozen=True)
class Image:
    """A root file system, and what its Dockerfile says of a container's process."""

    root: str
    entrypoint: tuple[str, ...]
    env: tuple[str, ...]
    user: str = "0"
    folder: str = "/"


@dataclass(frozen=True)
class Place:
    """Where a container runs: its pod's network, its cgroup, and what lies behind each of its volumes."""

    network: str
    cgroup: str
    hostname: str
    volumes: Mapping[str, str]
    files: Mapping[str, str]
    """By path in the container, what a kubelet puts there of its own: /etc/hosts."""


def num_bytes(quantity: str | int) -> int:
    """Of a quantity as Kubernetes writes it."""
    found = re.fullmatch(r"(\d+)([A-Za-z]*)", str(quantity))
    if found is None or found[2] not in SUFFIXES:
        raise ValueError(f"{quantity!r} is no quantity of bytes that is known here")
    return int(found[1]) * SUFFIXES[found[2]]


def runtime_config(container: Mapping[str, Any], image: Image, place: Place, seccomp: Any) -> dict[str, Any]:
    """``config.json``. ``seccomp``: the profile of RuntimeDefault, in OCI's words.

    Raises:
        ValueError: for a field that is not known here.
    """
    _check_known(container, OF_A_CONTAINER, "container")
    security = container.get("securityContext", {})
    _check_known(security, OF_A_SECURITY_CONTEXT, "securityContext")
    user = int(security.get("runAsUser", image.user))
    if security.get("runAsNonRoot") and user == 0:
        raise ValueError("runAsNonRoot, and the user is root")
    is_confined = security.get("seccompProfile", {}).get("type") == "RuntimeDefault"
    linux: dict[str, Any] = {
        "namespaces": [
            *({"type": kind} for kind in ("pid", "mount", "ipc", "uts", "cgroup")),
            {"type": "network", "path": place.network},
        ],
        "cgroupsPath": place.cgroup,
        "resources": _resources(container),
        "maskedPaths": list(MASKED),
        "readonlyPaths": list(READ_ONLY),
    }
    if is_confined and seccomp is not None:
        linux["seccomp"] = seccomp
    return {
        "ociVersion": "1.0.2",
        "hostname": place.hostname,
        "root": {"path": image.root, "readonly": bool(security.get("readOnlyRootFilesystem"))},
        "process": {
            "terminal": False,
            "user": {"uid": user, "gid": user},
            "cwd": image.folder,
            "args": [*container.get("command", image.entrypoint), *container.get("args", ())],
            "env": [
                *image.env,
                *_variables(container),
                f"HOSTNAME={place.hostname}",
            ],
            "noNewPrivileges": security.get("allowPrivilegeEscalation") is False,
            "capabilities": _capabilities(security.get("capabilities", {})),
            "rlimits": [
                {"type": "RLIMIT_MEMLOCK", "soft": MEMLOCK_BYTES, "hard": MEMLOCK_BYTES},
            ],
        },
        "mounts": _mounts(container, place),
        "linux": linux,
    }


def oci_seccomp(profile: Mapping[str, Any]) -> dict[str, Any]:
    """A profile in the form of Docker and Podman, for x86-64 and a container without capabilities of its own, in OCI's
    words and without io_uring."""
    calls = []
    for rule in profile["syscalls"]:
        includes, excludes = rule.get("includes", {}), rule.get("excludes", {})
        if includes.get("caps") or not {"amd64"} <= set(includes.get("arches", ("amd64",))):
            continue
        if "amd64" in excludes.get("arches", ()):
            continue
        names = sorted(set(rule["names"]) - NOT_IO_URING)
        kept = {name: rule[name] for name in ("action", "args", "errnoRet") if rule.get(name)}
        if names:
            calls.append({"names": names, **kept})
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile.get("defaultErrnoRet", 1),
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": calls,
    }


def _check_known(said: Mapping[str, Any], known: Iterable[str], what: str) -> None:
    unknown = sorted(set(said) - set(known))
    if unknown:
        raise ValueError(f"{what}: {', '.join(unknown)} not known here")


def _variables(container: Mapping[str, Any]) -> list[str]:
    for one in container.get("env", ()):
        _check_known(one, {"name", "value"}, "env")
    return [f"{one['name']}={one['value']}" for one in container.get("env", ())]


def _capabilities(said: Mapping[str, Any]) -> dict[str, list[str]]:
    """As containerd gives them: a process that is not root loses all but those it may be given back."""
    kept = () if "ALL" in said.get("drop", ()) else DEFAULT_CAPABILITIES
    names = sorted({f"CAP_{name}" for name in (*kept, *said.get("add", ()))})
    return {"bounding": names, "effective": names, "permitted": names}


def _resources(container: Mapping[str, Any]) -> dict[str, Any]:
    limits = container.get("resources", {}).get("limits", {})
    found: dict[str, Any] = {"devices": [{"allow": False, "access": "rwm"}]}
    if "memory" in limits:
        found["memory"] = {"limit": num_bytes(limits["memory"])}
    if "cpu" in limits:
        found["cpu"] = {"period": 100_000, "quota": int(float(limits["cpu"]) * 100_000)}
    return found


def _mounts(container: Mapping[str, Any], place: Place) -> list[dict[str, Any]]:
    tmpfs = ["nosuid", "strictatime", "mode=755", "size=65536k"]
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": tmpfs},
        {
            "destination": "/dev/pts",
            "type": "devpts",
            "source": "devpts",
            "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"],
        },
        {
            "destination": "/dev/shm",
            "type": "tmpfs",
            "source": "shm",
            "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],
        },
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
        {
            "destination": "/sys/fs/cgroup",
            "type": "cgroup",
            "source": "cgroup",
            "options": ["nosuid", "noexec", "nodev", "relatime", "ro"],
        },
    ]
    for path, source in place.files.items():
        mounts.append(_bind(source, path, is_read_only=False))
    for one in container.get("volumeMounts", ()):
        # A volume takes the place of what the runtime mounts there.
        mounts = [mount for mount in mounts if mount["destination"] != one["mountPath"]]
        mounts.append(_bind(place.volumes[one["name"]], one["mountPath"], is_read_only=bool(one.get("readOnly"))))
    return mounts


def _bind(source: str, path: str, *, is_read_only: bool) -> dict[str, Any]:
    options = ["rbind", "rprivate", "ro" if is_read_only else "rw"]
    return {"destination": path, "type": "bind", "source": source, "options": options}
