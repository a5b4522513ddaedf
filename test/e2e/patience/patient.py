# SPDX-License-Identifier: Apache-2.0
"""Servers that wait for other nodes as long as a busy machine makes them wait: what nodes give each other, half a
second to two, passes on it while nobody is at fault. `plugin` makes the folder that has servers load this."""

import os
from pathlib import Path

NODES_S = 10.0
REQUEST_S = 12.0
"""Longer than anybody who asks waits for answers."""


def install():
    """Be patient in this process. SGLang calls it once in each process of a server."""
    from banyan.arena import remote_tier
    from banyan.features.nodes import borrower, callers, questions, remote_prefetch_tier, remote_prefetches, tcp, waits

    questions.PATIENCE_S = borrower.PATIENCE_S = waits.FIRST_WORD_S = waits.SILENCE_S = NODES_S
    # A pull that stands still has its whole copy computed.
    callers.TOKEN_S = tcp.STALL_S = remote_prefetches.BORROW_S = NODES_S
    # A thread of its own hears what others have stored and taken back; who asks for a read waits twice as long.
    remote_prefetch_tier.NEWS_S = NODES_S / 2
    remote_tier.PATIENCE_S = REQUEST_S


def plugin(folder):
    """Variables of a server that is patient; ``folder`` is empty and stays."""
    described = folder / "patience-0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: patience\nVersion: 0\n")
    (described / "entry_points.txt").write_text("[sglang.srt.plugins]\npatience = patient:install\n")
    paths = (str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    return (("PYTHONPATH", os.pathsep.join(paths).rstrip(os.pathsep)),)
