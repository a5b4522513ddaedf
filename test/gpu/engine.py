# SPDX-License-Identifier: Apache-2.0
"""The real server with two ranks, on one GPU or on two, driven with nothing but the standard library.

A server that outlives its check keeps the GPU and answers the next check. So it has a port of its own, it dies with the
process that started it, and ``stop`` leaves nothing of its process group.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 16
PATIENCE_S = 20.0
SERVER = (
    "--dp 2 --page-size 16 --attention-backend triton --sampling-backend pytorch --mem-fraction-static 0.85 "
    "--max-total-tokens 65536 --enable-cache-report --random-seed 1 --enable-banyan --banyan-policy sglang "
    "--banyan-plan move "
    "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"
).split()
"""Options that come later win. Tokens bound the pool: a smaller fraction would not hold the weights of two ranks. What
can be moved is moved: a tiny model would compute it faster, and the check is of the transport."""

OPTIONS, STAND_IN = "SERVER_OPTIONS", "CUDA_STAND_IN"
"""Variables: what comes last of a server's arguments, and that there is no GPU but what stands in for one."""

LAUNCH = ("-m", "sglang.launch_server")
PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl
"""Found before any fork: a library must not be opened in the child of a process with threads."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``cached``: tokens of the prompt by where they came from, as SGLang reports them."""

    prompt: tuple[int, ...]
    tokens: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    cached: dict[str, int]
    ttft_s: float
    num_verified: int = 0
    """Forwards that verified drafts: the fewer, the more drafts were accepted. 0 where nothing is drafted."""
    gaps_s: tuple[float, ...] = ()
    """Between one piece of the answer and the next, as they came."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def die_with_parent() -> None:
    """In a child, before it becomes the server: whatever ends this process ends it as well."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_on_termination() -> None:
    """SIGTERM ends this process as ``sys.exit`` does, so that what is in ``finally`` is done."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


ONE_GPU, WITHOUT_INDEX_KEYS, WITHOUT_DRAFT_ROWS = "one_gpu", "without_index_keys", "without_draft_rows"
MIXED_WINDOWS, SMALL_PIECES = "mixed_windows", "small_pieces"
"""Plugins of SGLang beside this file: all ranks on the first GPU; pages that travel without their index keys, or
without the rows of their draft; window pages that land in each other's places; an arena that is pinned in small pieces.
"""

VISIBLE = "CUDA_VISIBLE_DEVICES"


def seeing(gpus: str) -> dict[str, str]:
    """The environment of a server that sees these GPUs alone, named as this process sees them."""
    names = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    return {VISIBLE: ",".join(names[int(gpu)] if names else gpu for gpu in gpus.split(","))}


def plugin_paths(folder: Path, *, plugins: Sequence[str] = (ONE_GPU,)) -> list[str]:
    """Where Python finds Banyan and, by which SGLang finds it, its entry point; and those ``plugins``.

    Where Banyan is not installed (a machine that reaches no package index), the entry point is written to ``folder``.
    """
    paths = [*(str(ROOT / "test/gpu" / name) for name in plugins), str(ROOT / "python")]
    try:
        importlib.metadata.distribution("banyan")
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        name, version = project["name"], project["version"]
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [
            line
            for group, points in project["entry-points"].items()
            for line in (f"[{group}]", *(f"{point} = {target}" for point, target in points.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        paths.append(str(folder.resolve()))
    return paths


class Server:
    """Starting when it is made; to be asked when ``wait_until_up`` has returned."""

    def __init__(
        self,
        model_path: str,
        *,
        log: Path,
        further: list[str],
        plugins: Sequence[str] = (ONE_GPU,),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.port = free_port()
        paths = [*plugin_paths(log.parent / "plugin", plugins=plugins), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, *LAUNCH, "--model-path", model_path, "--port", str(self.port)]
        self._log_path, self._log = log, log.open("w")
        self._popen = subprocess.Popen(
            [*command, *SERVER, *further, *os.environ.get(OPTIONS, "").split()],
            env={**os.environ, **environment, "PYTHONPATH": ":".join(paths)},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def wait_until_up(self, seconds: float) -> None:
        """
        Raises:
            SystemExit: when it does not come up within ``seconds``; it is stopped.
        """
        try:
            deadline = time.monotonic() + seconds
            while not self._is_up():
                if self._popen.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not come up: see {self._log_path}")
                time.sleep(1)
        except BaseException:
            self.stop()
            raise

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def post(self, path: str, body: dict) -> urllib.request.Request:
        """A request that is ready to be opened."""
        url, data = f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode()
        return urllib.request.Request(url, data, {"Content-Type": "application/json"})

    def generate(self, ids: list[int], rank: int, num_tokens: int = NUM_TOKENS) -> Answer:
        """Greedy tokens from a rank, streamed."""
        request = self.post(
            "/generate",
            {
                "input_ids": ids,
                "routed_dp_rank": rank,
                "stream": True,
                "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
            },
        )
        started, came_s, last = time.perf_counter(), [], {}
        with urllib.request.urlopen(request, timeout=300) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    came_s.append(time.perf_counter() - started)
                    last = json.loads(line[len(b"data: ") :])
        meta = last["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return Answer(
            tuple(ids),
            last["output_ids"],
            meta["prompt_tokens"],
            meta["cached_tokens"],
            details,
            came_s[0],
            meta.get("spec_verify_ct", 0),
            tuple(later - earlier for earlier, later in pairwise(came_s)),
        )

    def score(self, prompt: list[int], output: list[int], rank: int) -> tuple[list[float], dict[str, int]]:
        """Log-probabilities of the tokens of ``output`` behind ``prompt``, and where what was cached came from."""
        body = {
            "input_ids": prompt + output,
            "routed_dp_rank": rank,
            "return_logprob": True,
            "logprob_start_len": len(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        }
        with urllib.request.urlopen(self.post("/generate", body), timeout=300) as response:
            meta = json.load(response)["meta_info"]
        scored = [entry[0] for entry in meta["input_token_logprobs"] if entry[0] is not None]
        return scored[-(len(output) - 1) :], meta.get("cached_tokens_details") or {}

    def rank_states(self) -> list[dict]:
        """What each rank says of itself in ``/server_info``."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=60) as response:
            info = json.load(response)
        return [state["banyan"] for state in info["internal_states"] if "banyan" in state]

    def call(self, path: str, **body: object) -> None:
        """Anything else that answers when it is done."""
        with urllib.request.urlopen(self.post(path, body), timeout=300) as response:
            response.read()

    def stop(self) -> None:
        """End the server. The group is killed also when its first process has ended well: others may not have."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._popen.pid, number)
                self._popen.wait(PATIENCE_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._log.close()
