# SPDX-License-Identifier: Apache-2.0
"""SGLang's CPU engine, made fit to serve: a plugin for any SGLang server on a machine without a GPU.

It brings an attention backend whose cost is new tokens x context (``attention``), what SGLang computes with Triton on
every device (``linear_attention``, ``draft_attention``, ``float8``, ``plain_memory``), and a dispatcher that waits for
messages (``patient_socket``). A server runs with it that is started with ``--enable-banyan-cpu-engine``, with
``--attention-backend banyan_cpu``, or with ``--enable-banyan`` on a CPU; on any other, each hook passes through.
"""

from __future__ import annotations

ATTENTION_BACKEND = "banyan_cpu"
"""Its name behind ``--attention-backend``."""


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``."""
    # Imported here: the package must import where SGLang is not installed.
    from banyan_cpu_engine import launcher, seam

    seam.HOOKS.register()
    launcher.offer()
