# SPDX-License-Identifier: Apache-2.0
"""Pairs whose hand-over goes over a slow network: what of the transfer is seen, and how many bytes pass.

    python -m benchmark.pd --slow          needs root, `unshare` and `tc`

A pair with Banyan and one without it, one after the other, in a network of their own in which NIXL (over TCP) gets
`LINK_MBIT`. Asked of each: cold prompts, streamed, with a fast network and with the slow one in turns; then a next
turn of which both servers have all but some 5 %.

* `exposed_transfer_share`, and `_stock` of the pair without Banyan: of the shorter of compute and transfer, the part
  that the time to the first token has beside the longer one: (TTFT - max) / min. Compute: the time to the first token
  of the prompt before, with the fast network. Transfer: the bytes that passed, at the link's rate. Medians.
* `handover_wire_ratio`: bytes of the next turn's hand-over, to those of the pair without Banyan, whose decode server
  keeps nothing. Headers, acknowledgements and SGLang's own bookkeeping over NIXL are in both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.engine import Engine
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.own_network import DEVICE, FAST_MBIT, SLOW_PORTS, SlowPorts, figures_inside
from benchmark.pd_checks import ttft_s
from benchmark.pd_servers import PAGE_TOKENS, Pair
from benchmark.provenance import provenance
from benchmark.servers import Share, unwind_on_sigterm
from benchmark.store_server import prompts

LINK_MBIT = 200
PROMPT_TOKENS = 1600
NUM_PROMPTS = 5
POOL_TOKENS = 16_000
QUESTION_TOKENS = 40
ENV = (
    # Which SGLang would ask the network for.
    ("SGLANG_HOST_IP", "127.0.0.1"),
    ("UCX_TLS", "tcp"),
    ("UCX_NET_DEVICES", DEVICE),
    ("UCX_TCP_PORT_RANGE", f"{SLOW_PORTS.start}-{SLOW_PORTS.stop - 1}"),
)


def exposed_share(*, ttft_s: float, compute_s: float, transfer_s: float) -> float:
    """Of the shorter of the two, the part that is not hidden behind the longer one."""
    return (ttft_s - max(compute_s, transfer_s)) / min(compute_s, transfer_s)


def measure_kind(kind: Share, model: Path, out: Path, network: SlowPorts, seed: int) -> dict[str, Any]:
    """One pair, started and stopped."""
    store = out / "slow-store" if kind == "on" else None
    pair = Pair(
        f"slow-{kind}",
        kind,
        model,
        out / "logs",
        store=store,
        prefill_args=("--max-total-tokens", str(POOL_TOKENS)),
        decode_args=(
            *("--max-total-tokens", str(POOL_TOKENS)),
            *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
        ),
        env=ENV,
    )
    asked = iter(prompts(model, [PROMPT_TOKENS] * (2 * NUM_PROMPTS + 2), seed=seed))
    network.limit(FAST_MBIT)
    with pair, pair.routed() as url:
        # The first forward of this size allocates: no lesson.
        ttft_s(url, next(asked))
        fast_s, slow_s, num_bytes = [], [], 0
        for _ in range(NUM_PROMPTS):
            network.limit(FAST_MBIT)
            fast_s.append(ttft_s(url, next(asked)))
            network.limit(LINK_MBIT)
            before = network.num_bytes()
            slow_s.append(ttft_s(url, next(asked)))
            num_bytes += network.num_bytes() - before
        next_turn_bytes = _next_turn_bytes(url, next(asked), model, network, seed)
        advanced = pair.total(pair.prefills[0], "advanced_pages") if kind == "on" else 0
    return {
        "fast_ttft_s": fast_s,
        "slow_ttft_s": slow_s,
        "transfer_s": num_bytes / NUM_PROMPTS * 8 / (LINK_MBIT * 1e6),
        "next_turn_bytes": next_turn_bytes,
        "advanced_pages": advanced,
    }


def _next_turn_bytes(url: str, first: list[int], model: Path, network: SlowPorts, seed: int) -> int:
    """What the hand-over of a next turn takes."""
    output = Engine(url).generate(first, num_tokens=PAGE_TOKENS)["output_ids"]
    (question,) = prompts(model, [QUESTION_TOKENS], seed=seed + 1)
    before = network.num_bytes()
    Engine(url).generate([*first, *output, *question], num_tokens=2)
    return network.num_bytes() - before


def figures(kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    shares = {
        kind: statistics.median(
            exposed_share(ttft_s=slow_s, compute_s=fast_s, transfer_s=found["transfer_s"])
            for fast_s, slow_s in zip(found["fast_ttft_s"], found["slow_ttft_s"], strict=True)
        )
        for kind, found in kinds.items()
    }
    return {
        "exposed_transfer_share": round(shares["on"], 4),
        "exposed_transfer_share_stock": round(shares["off"], 4),
        "handover_wire_ratio": round(kinds["on"]["next_turn_bytes"] / kinds["off"]["next_turn_bytes"], 4),
        "slow": {
            "kinds": kinds,
            "sizes": {"link_mbit": LINK_MBIT, "prompt_tokens": PROMPT_TOKENS, "num_prompts": NUM_PROMPTS},
            "provenance": provenance(),
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.pd_slow", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    network, model = SlowPorts(), ensure_model(DEFAULT_TARGET)
    shutil.rmtree(args.out / "slow-store", ignore_errors=True)
    kinds: tuple[Share, ...] = ("off", "on")
    found = figures({kind: measure_kind(kind, model, args.out, network, args.seed) for kind in kinds})
    shutil.rmtree(args.out / "slow-store", ignore_errors=True)
    # What docs/benchmarks/pd_slow.json is a copy of.
    (args.out / "slow_figures.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(out: Path, seed: int) -> dict[str, Any]:
    """Run this in a network of its own.

    Raises:
        RuntimeError: when it did not end well; what it has said stands before.
    """
    otherwise = "nothing was measured over a slow network"
    return figures_inside("benchmark.pd_slow", ["--seed", str(seed)], out, "slow_figures.json", otherwise)


if __name__ == "__main__":
    sys.exit(main())
