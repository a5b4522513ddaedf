# SPDX-License-Identifier: Apache-2.0
"""What this machine's processor multiplies at a fair speed.

Without AVX-512 oneDNN has no kernel for bfloat16 and takes a plain loop: 9 GFLOP/s a core where float32 gets 87 (AMD
EPYC of the third generation, rows of 576 by 1,536). A model in bfloat16 then takes ten times as long as in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from banyan.config import CPU_FEATURE_FOR_BFLOAT16

CPUINFO = Path("/proc/cpuinfo")


def features(cpuinfo: str) -> frozenset[str]:
    """What the kernel's ``cpuinfo`` says of the first core, in its words; empty where it says nothing."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def dtype_for(known: Iterable[str]) -> str:
    """The type to compute in on a processor with these ``features``."""
    known = frozenset(known)
    return "bfloat16" if not known or CPU_FEATURE_FOR_BFLOAT16 in known else "float32"


def features_here() -> frozenset[str]:
    return features(CPUINFO.read_text() if CPUINFO.exists() else "")


CPU_ENGINE = ("--device", "cpu", "--dtype", dtype_for(features_here()))
"""How servers of a real model are started here."""
