# SPDX-License-Identifier: Apache-2.0
"""What each of SGLang's HTTP workers serves where there are several (``--tokenizer-worker-num``): SGLang's own
application, in a process that has Banyan's hooks. SGLang loads no plugins there by itself, and swallows what fails.
"""

from __future__ import annotations

from contextlib import suppress

from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_server_args

from banyan import faults
from banyan.feature_list import CORE, switched_off
from banyan.refusals.start import http_worker_refusal
from banyan.sglang_plugin import last_words, runtime, seams

runtime.become_front()
load_plugins()
for off in switched_off(seams.HOOKS.missing("main")):
    if off.name == CORE:
        last_words.end_from_worker(f"{runtime.REFUSED}{http_worker_refusal(off.line)}")

# Imported behind the hooks: it takes some of what they are put on by name.
from sglang.srt.entrypoints.http_server import app  # noqa: E402

from banyan.sglang_plugin.launcher import ending  # noqa: E402
from banyan.sglang_plugin.launcher.loads import rank_table_at  # noqa: E402

__all__ = ["app"]


def _count_failure() -> None:
    # SGLang tells this process its arguments later than it imports this.
    with suppress(ValueError, OSError):
        carried = runtime.bookkeeping(get_server_args())
        if carried is not None and "rank_table" in carried:
            rank_table_at(carried["rank_table"]).count_failure()


faults.count_at(_count_failure)
if runtime.is_on("guards", "46-ending"):
    # Here, and by no hook: where SGLang sets a worker up its application runs, and takes nothing more in front of it.
    ending.add_to(app)
