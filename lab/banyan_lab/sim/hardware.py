# SPDX-License-Identifier: Apache-2.0
"""Hardware as data: ``data/hardware.toml`` read into frozen values. Bytes, bytes per second, FLOP per second."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@cache
def table(name: str) -> dict[str, Any]:
    """One file of ``banyan_lab/sim/data``."""
    return tomllib.loads((resources.files("banyan_lab.sim") / "data" / f"{name}.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Gpu:
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    hbm_bytes: float
    hbm_bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A server. The compute NIC is of each GPU, everything else of the node."""

    gpu: Gpu
    num_gpus: int
    compute_nic_bytes_per_s: float
    storage_nic_bytes_per_s: float
    dram_bytes_per_s: float
    dram_buffer_bytes: float
    source: str


@dataclass(frozen=True, slots=True)
class Drive:
    """An SSD, or several as one."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    capacity_bytes: float
    drive_writes_per_day: float
    source: str


def gpu(name: str) -> Gpu:
    return Gpu(**table("hardware")["gpu"][name])


def node(name: str) -> NodeSpec:
    values = dict(table("hardware")["node"][name])
    return NodeSpec(**{**values, "gpu": gpu(values["gpu"])})


def drive(name: str) -> Drive:
    return Drive(**table("hardware")["drive"][name])


def write_weight() -> float:
    """Reads that one queued write costs a drive."""
    return float(table("hardware")["interference"]["write_weight"])
