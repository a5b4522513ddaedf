# SPDX-License-Identifier: Apache-2.0
"""The real server with two ranks on one GPU: prompts that come back to the other rank, sharing off against on.

    python test/gpu/server_check.py --model-path M [--port 32150] [--seconds 240] [-- further server arguments]

Prints one JSON object; exit status 1 when tokens differ or nothing was fetched.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_PROMPTS = 12
NUM_TOKENS = 16
SERVER = (
    "--dp 2 --page-size 16 --attention-backend triton --sampling-backend pytorch --mem-fraction-static 0.3 "
    "--max-total-tokens 65536 --enable-cache-report --random-seed 1 "
    "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"
).split()


class Server:
    def __init__(self, args: argparse.Namespace, share: str, log: Path) -> None:
        self.port = args.port
        paths = [str(ROOT / "test/gpu/one_gpu"), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
        command = [
            sys.executable,
            "-m",
            "sglang.launch_server",
            "--model-path",
            args.model_path,
            "--port",
            str(args.port),
        ]
        self.log = log.open("w")
        self.popen = subprocess.Popen(
            [*command, *SERVER, "--enable-banyan", "--banyan-share", share, "--banyan-policy", "sglang", *args.further],
            env={**os.environ, "PYTHONPATH": ":".join(paths)},
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + args.seconds
        while not self._is_up():
            if self.popen.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise SystemExit(f"server with share={share} did not come up: see {log}")
            time.sleep(1)

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def generate(self, ids: list[int], rank: int) -> dict:
        body = {
            "input_ids": ids,
            "routed_dp_rank": rank,
            "sampling_params": {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        started = time.perf_counter()
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        details = answer["meta_info"].get("cached_tokens_details") or {}
        return {
            "tokens": answer["output_ids"],
            "cached": answer["meta_info"]["cached_tokens"],
            "peer": details.get("peer", 0),
            "seconds": time.perf_counter() - started,
        }

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.popen.pid, number)
                self.popen.wait(20)
                break
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self.log.close()


def story(server: Server) -> dict[str, list[dict]]:
    """Every prompt on rank 0, then again on rank 1; lengths and contents are fixed."""
    chance = random.Random(0)
    prompts = [[chance.randrange(5, 250) for _ in range(chance.randrange(400, 2000))] for _ in range(NUM_PROMPTS)]
    return {name: [server.generate(ids, rank) for ids in prompts] for rank, name in enumerate(("first", "again"))}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--port", type=int, default=32150)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--log", type=Path, default=Path("build/gpu"))
    parser.add_argument("further", nargs="*")
    args = parser.parse_args()
    args.log.mkdir(parents=True, exist_ok=True)
    runs = {}
    for share in ("off", "peer"):
        server = Server(args, share, args.log / f"server-{share}.log")
        try:
            runs[share] = story(server)
        finally:
            server.stop()
    parts = ("first", "again")
    tokens = {
        share: [[one["tokens"] for one in run[part]] for part in ("first", "again")] for share, run in runs.items()
    }
    result = {
        "num_prompts": NUM_PROMPTS,
        "equal_tokens": tokens["off"] == tokens["peer"],
        "peer_tokens": sum(one["peer"] for one in runs["peer"]["again"]),
        **{
            f"{part}_{share}_s": statistics.median(one["seconds"] for one in run[part])
            for share, run in runs.items()
            for part in parts
        },
    }
    print(json.dumps(result, indent=2))
    return 0 if result["equal_tokens"] and result["peer_tokens"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
