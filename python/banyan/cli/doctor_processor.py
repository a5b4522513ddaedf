# SPDX-License-Identifier: Apache-2.0
"""What the processor means: for the native core, and for SGLang's CPU engine (equal tokens, the speed of bfloat16)."""

from __future__ import annotations

import platform
from collections.abc import Collection
from pathlib import Path

from banyan import _native, config
from banyan.cli.finding import Finding

CPUINFO = Path("/proc/cpuinfo")
X86, ARM = "x86_64", "aarch64"
"""What the native core is built and tested for."""


def examine_processor() -> list[Finding]:
    """Every finding about it."""
    machine = platform.machine()
    found = [architecture(machine, _native.copy_form())]
    if machine == X86:
        flags = CPUINFO.read_text().split()
        return [*found, rounding(flags, config.most_cpu_isa()), bfloat16(flags)]
    unknown = f"not known of {machine}: SGLang's CPU engine was tried on {X86} only"
    return found + [Finding(what, True, unknown) for what in ("CPU rounding", "CPU bfloat16")]


def architecture(machine: str, copy_form: str) -> Finding:
    """``copy_form``: what the native core copies between pools and the arena in host memory with."""
    detail = f"{machine}; pages in host memory are copied by {copy_form}"
    if machine == ARM:
        # Loads and stores of other processors come in any order here; the core's tests model no other.
        return Finding("processor", True, f"{detail}; its weak memory order is what the core is written for")
    advice = f"the native core is built for {X86} and {ARM}: build and test it yourself (make check)"
    return Finding("processor", machine == X86, detail, advice)


def rounding(cpu_flags: Collection[str], most: str | None) -> Finding:
    """Whether equal tokens can be expected: docs/design/0003. ``most``: oneDNN's limit."""
    if "amx_bf16" not in cpu_flags:
        return Finding("CPU rounding", True, "no AMX")
    # It has names with AMX in them, and one for all that there is; what is none of its names changes nothing.
    if most is not None and most.upper().startswith(("SSE", "AVX")) and "AMX" not in most.upper():
        return Finding("CPU rounding", True, f"oneDNN up to {most}")
    detail = (
        "with AMX a row of a product rounds differently with the number of rows, so SGLang's CPU engine gives other "
        "tokens now and then where a prefix was cached, by whatever cache; for equal tokens start it with "
        f"ONEDNN_MAX_CPU_ISA={config.CPU_ISA_WITHOUT_AMX}, which is slower"
    )
    return Finding("CPU rounding", True, "AMX", hint=detail)


def bfloat16(cpu_flags: Collection[str]) -> Finding:
    """Whether the type of most models' weights is multiplied at a fair speed."""
    if config.CPU_FEATURE_FOR_BFLOAT16 in cpu_flags:
        return Finding("CPU bfloat16", True, "AVX-512")
    detail = (
        "this processor multiplies bfloat16 in a plain loop, some ten times slower than float32: "
        "start SGLang's CPU engine with --dtype float32"
    )
    return Finding("CPU bfloat16", True, "no AVX-512", hint=detail)
