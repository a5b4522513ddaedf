# SPDX-License-Identifier: Apache-2.0
"""What each of SGLang's HTTP workers serves where there are several (``--tokenizer-worker-num``): SGLang's own
application, in a process that has Banyan's hooks. SGLang loads no plugins there by itself.
"""

from __future__ import annotations

from sglang.srt.plugins import load_plugins

from banyan.sglang_plugin import runtime

runtime.become_front()
load_plugins()

# Imported behind the hooks: it takes some of what they are put on by name.
from sglang.srt.entrypoints.http_server import app  # noqa: E402

__all__ = ["app"]
