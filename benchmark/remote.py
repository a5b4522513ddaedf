# SPDX-License-Identifier: Apache-2.0
"""What another node's arena is worth: prefixes from there against computing them, and bytes against bare NIXL.

    python -m benchmark.remote --repeats 3

Two servers of one rank each, on a core each; the second one asks the first. Each repeat has prompts of its own: the
first server answers them, then each is asked once of the second server as it is (its pages are at the other node) and
once under a salt (they are nowhere), in alternating order, one request at a time. Answers are compared. Beside that the
bytes of as many pages go between two processes, by Banyan's door and by a NIXL READ in turns. Writes
build/remote/report.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from banyan.cli.engine import Engine
from banyan.planner import Action
from benchmark import remote_link
from benchmark.metrics import spread
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.processor import CPU_ENGINE
from benchmark.results import write_report
from benchmark.servers import Server, ServerSpec, cpu_env, free_port, unwind_on_sigterm, wait_ready, write_secret
from benchmark.store_server import prompts

PROMPT_TOKENS = 2000
NUM_PROMPTS = 4
NUM_OUTPUT_TOKENS = 16
PATIENCE_S = 120.0
FLAGS = (*CPU_ENGINE, "--max-total-tokens", "24000", "--sleep-on-idle", "--banyan-host-gb", "1")


class Nodes:
    """The two servers."""

    def __init__(self, model: Path, folder: Path) -> None:
        secret = write_secret(folder / "secret")
        door = f"127.0.0.1:{free_port()}"
        flags = (*FLAGS, "--banyan-secret-file", str(secret))

        def start(label: str, core: int, *more: str) -> Server:
            env = cpu_env(dp=1, first_core=core)
            return Server(ServerSpec(label, 1, "on", (*flags, *more), env), model, folder / "logs")

        self._servers = [start("lender", 0, "--banyan-listen", door), start("borrower", 1, "--banyan-peers", door)]
        self.lender, self.borrower = (Engine(server.url) for server in self._servers)

    def __enter__(self) -> Nodes:
        wait_ready(self._servers)
        self._until(lambda: self.borrower.ranks()[0]["nodes"]["num_listening"] == 1)
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers:
            server.stop()

    def lend(self, ids: Sequence[int]) -> list[int]:
        """The first server's answer, once the prompt lies in its arena."""
        before = self.lender.ranks()[0]["backed_up_pages"]
        output = self.lender.generate(ids, num_tokens=NUM_OUTPUT_TOKENS)["output_ids"]
        self._until(lambda: self.lender.ranks()[0]["backed_up_pages"] >= before + len(ids) // 16)
        return list(output)

    def _until(self, condition: Any) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise RuntimeError("the servers do not come to it")
            time.sleep(0.2)


def measure(nodes: Nodes, asked: Sequence[list[int]], repeat: int) -> list[dict[str, Any]]:
    """Both ways for each prompt, the first one taking turns; then the tokens."""
    # The first forwards allocate: no lesson.
    nodes.borrower.generate(list(range(1000, 1400)))
    rows = []
    for number, ids in enumerate(asked):
        expected = nodes.lend(ids)
        row: dict[str, Any] = {"repeat": repeat, "prompt": number}
        for way in ("remote", "compute") if (number + repeat) % 2 else ("compute", "remote"):
            salt = f"again-{repeat}-{number}" if way == "compute" else None
            action = Action.COMPUTE if way == "compute" else None
            started_s = time.perf_counter()
            answer = nodes.borrower.generate(ids, action=action, cache_salt=salt)
            row[f"{way}_s"] = time.perf_counter() - started_s
            if way == "remote":
                row["remote_tokens"] = (answer["meta_info"]["cached_tokens_details"] or {}).get("remote", 0)
        row["is_identical"] = nodes.borrower.generate(ids, num_tokens=NUM_OUTPUT_TOKENS)["output_ids"] == expected
        rows.append(row)
    return rows


def summarise(rows: Sequence[dict[str, Any]], link: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The figures; the ratio of times to first token is that of the means of a repeat."""
    repeats = sorted({row["repeat"] for row in rows})
    ratios = []
    for repeat in repeats:
        group = [row for row in rows if row["repeat"] == repeat]
        means = [statistics.mean(row[f"{way}_s"] for row in group) for way in ("remote", "compute")]
        ratios.append(means[0] / means[1])
    return {
        "remote_ttft_ratio": spread(ratios),
        **{name: spread(values) for name, values in remote_link.figures(link).items()},
        "remote_token_share": min(row["remote_tokens"] for row in rows) / PROMPT_TOKENS,
        "outputs_identical": all(row["is_identical"] for row in rows),
        "num_compared": len(rows),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.remote", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--link-repeats", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/remote"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    model = ensure_model(DEFAULT_TARGET)
    link = remote_link.run(args.link_repeats)
    rows: list[dict[str, Any]] = []
    with Nodes(model, args.out) as nodes:
        for repeat in range(args.repeats):
            asked = prompts(model, [PROMPT_TOKENS] * NUM_PROMPTS, seed=args.seed + repeat)
            rows += measure(nodes, asked, repeat)
    report = summarise(rows, link)
    write_report(args.out / "report.json", {**report, "rows": rows, "link": link}, args)
    print(json.dumps(report, indent=2), flush=True)
    # Without InfiniBand, NIXL's library faults when it is unloaded.
    os._exit(0 if report["outputs_identical"] else 1)


if __name__ == "__main__":
    sys.exit(main())
