# SPDX-License-Identifier: Apache-2.0
"""Programs that need SGLang imported and no plugin loaded, in forks of one process: the import takes ten seconds."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmark.warm import MODULES

ROOT = Path(__file__).parents[1]
LONGEST_S = 600

FORKING = """
import importlib, json, os, signal, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
assert "banyan" not in sys.modules, "each program imports its own"
for line in sys.stdin:
    asked = json.loads(line)
    pid = os.fork()
    if not pid:
        signal.alarm(int(sys.argv[1]))
        for stream, name in ((0, os.devnull), (1, asked["out"]), (2, asked["err"])):
            os.dup2(os.open(name, os.O_RDWR), stream)
        os.environ.update(asked["variables"])
        sys.path[:0] = asked["paths"]
        sys.argv = ["-c", *asked["arguments"]]
        exec(asked["program"], {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@functools.cache
def _forking() -> subprocess.Popen[str]:
    """Ends with who started it, when its input does."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKING, str(LONGEST_S), *MODULES],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run(
    program: str,
    *arguments: str,
    paths: Sequence[Path] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, with these ``paths`` searched first."""
    forking = _forking()
    assert forking.stdin is not None and forking.stdout is not None
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        asked = {
            **{
                "program": program,
                "arguments": arguments,
                "paths": list(map(str, paths)),
                "variables": dict(variables),
            },
            **{"out": out.name, "err": err.name},
        }
        print(json.dumps(asked), file=forking.stdin, flush=True)
        said = forking.stdout.readline()
        assert said, "the process that programs are forked from has ended"
        return subprocess.CompletedProcess(arguments, int(said), out.read(), err.read())
