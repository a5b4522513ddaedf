# SPDX-License-Identifier: Apache-2.0
"""Servers that need a feature of which a patch does not fit the SGLang that is installed: pure."""

from __future__ import annotations

from collections.abc import Sequence

from banyan import SGLANG_VERSION


def misfit_refusal(*, needed_by: str, feature: str, reasons: Sequence[str]) -> str:
    """``needed_by`` names a flag, or what the model has."""
    return (
        f"{needed_by}: needs Banyan's {feature}, which does not fit this SGLang ({'; '.join(reasons)}): install "
        f"sglang=={SGLANG_VERSION} as it was published, do without, or use --banyan-share off"
    )
