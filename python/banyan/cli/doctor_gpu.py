# SPDX-License-Identifier: Apache-2.0
"""What ``banyan doctor`` says about a machine's GPUs: what sharing between them needs, before a server meets it."""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

from banyan.cli.doctor_limits import host_obstacles
from banyan.cli.finding import Finding
from banyan.transport.cuda_ipc.driver import CudaDriver, DriverError
from banyan.transport.cuda_ipc.gpu_io import comes_past

PROBE_BYTES = 2 << 20
COMPILERS = ("nvcc", "ninja", "c++")


def examine_gpus(open_driver: Callable[[], CudaDriver], *, sys: Path = Path("/sys")) -> list[Finding]:
    """Every finding. One that says there is no GPU where there is none; a context on the first GPU for a moment."""
    try:
        driver = open_driver()
        num_devices = driver.num_devices()
    except DriverError as error:
        return [Finding("GPU", True, f"none, ranks share the host's memory ({error})")]
    if num_devices == 0:
        return [Finding("GPU", True, "none, ranks share the host's memory")]
    devices = range(num_devices)
    return [
        _devices(driver, devices),
        asked("CUDA IPC", lambda: _ipc(driver)),
        asked("peer access", lambda: _peer_access(driver, devices)),
        asked("read-only registration", lambda: _registration(driver, devices)),
        asked("stream waits", lambda: _stream_waits(driver)),
        asked("NUMA", lambda: numa(driver, devices, sys)),
        _page_hash(),
    ]


def asked(what: str, ask: Callable[[], Finding]) -> Finding:
    """What a question finds; a refusal of the driver is a finding too."""
    try:
        return ask()
    except DriverError as error:
        return Finding(what, False, str(error), "see docs/gpu.md; --banyan-share off serves without sharing")


def _devices(driver: CudaDriver, devices: Sequence[int]) -> Finding:
    major, minor = driver.driver_version()
    names = ", ".join(f"{device}: {driver.device_name(device)} ({driver.num_sms(device)} SMs)" for device in devices)
    detail = f"{names}; driver for CUDA {major}.{minor}"
    if len(devices) == 1:
        detail += "; one GPU: SGLang gives every data-parallel rank a GPU of its own, so --dp 2 needs another one"
    return Finding("GPU", True, detail)


def _ipc(driver: CudaDriver) -> Finding:
    with driver.on_device(0):
        address = driver.allocate(PROBE_BYTES)
        try:
            is_ok = driver.is_exportable(address) and len(driver.export_handle(address)) > 0
        finally:
            driver.free(address)
    advice = "pages can go through the host arena: --banyan-host-gb"
    return Finding("CUDA IPC", is_ok, "memory has handles" if is_ok else "memory has no handles", advice)


def _peer_access(driver: CudaDriver, devices: Sequence[int]) -> Finding:
    apart = [
        f"{one}-{other}"
        for one, other in combinations(devices, 2)
        if not (driver.can_access(one, other) and driver.can_access(other, one))
    ]
    num_pairs = len(devices) * (len(devices) - 1) // 2
    detail = f"{num_pairs - len(apart)} of {num_pairs} pairs" + (f"; not {', '.join(apart)}" if apart else "")
    return Finding(
        "peer access", not apart, detail, "ranks on these pairs share through the host arena only: --banyan-host-gb"
    )


def _registration(driver: CudaDriver, devices: Sequence[int]) -> Finding:
    has_it = all(driver.registers_read_only(device) for device in devices)
    detail = "there" if has_it else "not there, as on most discrete GPUs: parts of the arena are registered plainly"
    return Finding("read-only registration", True, detail)


def _stream_waits(driver: CudaDriver) -> Finding:
    with driver.on_device(0):
        word, stream = driver.allocate_pinned(64), driver.create_stream()
        try:
            ctypes.memset(word, 0, 64)
            has_passed = comes_past(driver, stream, word)
        finally:
            # Not below zero, as the device counts.
            ctypes.memset(word, 0x7F, 64)
            driver.destroy_stream(stream)
            driver.free_pinned(word)
    detail = "streams wait for words of the host's memory" if has_passed else "a stream did not see a word"
    return Finding(
        "stream waits", has_passed, detail, "pages of the store are leased when all their layers have landed"
    )


def numa(driver: CudaDriver, devices: Sequence[int], sys: Path) -> Finding:
    """Which GPU is near which memory."""
    node_of = {device: _numa_node(driver.pci_address(device), sys) for device in devices}
    nodes = sorted({node for node in node_of.values() if node >= 0})
    detail = ", ".join(f"GPU {device} on node {node}" for device, node in node_of.items() if node >= 0) or "one node"
    if len(nodes) > 1:
        detail += "; a rank's part of the arena lies where its process ran first: set SGLANG_NUMA_BIND_V2=1"
    return Finding("NUMA", True, detail)


def _numa_node(pci_address: str, sys: Path) -> int:
    try:
        return int((sys / "bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def page_hash_obstacles() -> list[str]:
    """What SGLang needs to compile at its first start on a GPU and does not find."""
    missing = [name for name in COMPILERS if shutil.which(name) is None]
    missing += [one for one in host_obstacles() if one not in missing]
    return missing + ([] if ctypes.util.find_library("crypto") else ["libcrypto"])


def _page_hash() -> Finding:
    missing = page_hash_obstacles()
    detail = f"not found: {', '.join(missing)}" if missing else "compilers, OpenSSL's headers and libcrypto are there"
    return Finding(
        "what SGLang compiles", not missing, detail, "install them: SGLang compiles its page hash and kernels"
    )
