# SPDX-License-Identifier: Apache-2.0
"""SGLang's `Engine`, for programs that generate without a server, with Banyan's flags.

    from banyan.sglang_plugin.launcher.offline import engine

    if __name__ == "__main__":
        answers = engine("--model-path", "M", "--dp", "2", "--enable-banyan").generate(["Once upon a time"])

`Engine(**arguments)` takes SGLang's own arguments only; a command line takes all of them.
"""

from __future__ import annotations

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args


def engine(*arguments: str) -> Engine:
    """An engine in this process, as `python -m sglang.launch_server` would start it with ``arguments``.

    Raises:
        SystemExit: when Banyan cannot serve so; the lines are on stderr.
    """
    load_plugins()
    return Engine(server_args=prepare_server_args(list(arguments)))
