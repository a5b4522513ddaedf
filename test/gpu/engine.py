# SPDX-License-Identifier: Apache-2.0
"""The real server with two ranks on one GPU, driven with nothing but the standard library."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 16
PATIENCE_S = 20
SERVER = (
    "--dp 2 --page-size 16 --attention-backend triton --sampling-backend pytorch --mem-fraction-static 0.3 "
    "--max-total-tokens 65536 --enable-cache-report --random-seed 1 --enable-banyan --banyan-policy sglang "
    "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"
).split()


@dataclass(frozen=True, slots=True)
class Answer:
    """``cached``: tokens of the prompt by where they came from, as SGLang reports them."""

    tokens: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    cached: dict[str, int]
    ttft_s: float


def plugin_paths(folder: Path) -> list[str]:
    """Where Python finds Banyan and, by which SGLang finds it, its entry point.

    Where Banyan is not installed (a machine that reaches no package index), the entry point is written to ``folder``.
    """
    paths = [str(ROOT / "test/gpu/one_gpu"), str(ROOT / "python")]
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
    """Up when it is made.

    Raises:
        SystemExit: when it does not come up within ``seconds``.
    """

    def __init__(self, model_path: str, *, port: int, seconds: float, log: Path, further: list[str]) -> None:
        self.port = port
        paths = [*plugin_paths(log.parent / "plugin"), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model_path, "--port", str(port)]
        self._log = log.open("w")
        self._popen = subprocess.Popen(
            [*command, *SERVER, *further],
            env={**os.environ, "PYTHONPATH": ":".join(paths)},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + seconds
        while not self._is_up():
            if self._popen.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise SystemExit(f"the server did not come up: see {log}")
            time.sleep(1)

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

    def generate(self, ids: list[int], rank: int) -> Answer:
        """Greedy tokens from a rank, streamed."""
        request = self.post(
            "/generate",
            {
                "input_ids": ids,
                "routed_dp_rank": rank,
                "stream": True,
                "sampling_params": {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
            },
        )
        started, ttft_s, last = time.perf_counter(), 0.0, {}
        with urllib.request.urlopen(request, timeout=300) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    ttft_s = ttft_s or time.perf_counter() - started
                    last = json.loads(line[len(b"data: ") :])
        meta = last["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return Answer(last["output_ids"], meta["prompt_tokens"], meta["cached_tokens"], details, ttft_s)

    def call(self, path: str, **body: object) -> None:
        """Anything else that answers when it is done."""
        with urllib.request.urlopen(self.post(path, body), timeout=300) as response:
            response.read()

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._popen.pid, number)
                self._popen.wait(PATIENCE_S)
                break
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._log.close()
