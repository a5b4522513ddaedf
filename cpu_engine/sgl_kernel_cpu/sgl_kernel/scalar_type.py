# SPDX-License-Identifier: Apache-2.0
"""Names of the quantised scalar types that SGLang mentions while it is imported.

No kernel of this stand-in computes with them: asking for a quantised model on the CPU fails in SGLang itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace


@dataclass(frozen=True)
class ScalarType:
    """A scalar of ``size_bits`` bits whose stored value is the real one plus ``bias``."""

    name: str
    size_bits: int
    bias: int = 0


scalar_types = SimpleNamespace(
    uint4=ScalarType("uint4", 4),
    uint8=ScalarType("uint8", 8),
    uint4b8=ScalarType("uint4b8", 4, bias=8),
    uint8b128=ScalarType("uint8b128", 8, bias=128),
    float8_e4m3fn=ScalarType("float8_e4m3fn", 8),
    float4_e2m1f=ScalarType("float4_e2m1f", 4),
)
