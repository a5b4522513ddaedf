# SPDX-License-Identifier: Apache-2.0
"""What it is worth that a decode server reads a part of the prompt from its store for its prefill server.

    python -m benchmark.pd --dual

One pair with a tiny model and one store at a time, in three settings: the prefill server's reads are limited, both
servers' are, or nobody's. In each, two routers stand in front of the pair, one of them with `--no-dual-path`. The same
prompts are asked round after round, one request at a time; pools and arenas are so small that by its next turn each has
left them, and only the store has it. In every round half of the prompts go through each router, in the next round the
other half. Servers are told to move what they find (`--banyan-plan move`): a tiny model would compute it faster.

* `dual_ttft_ratio`: time of a request for one token, with the dual path to without, the prefill server limited;
  `split_ratio`: both limited alike; `unlimited_ratio`: nobody. Medians over rounds of the ratio of a round's means.
* `read_balance_max_over_mean`: bytes that the two servers have read in the rounds with both limited, dual path on.
* `dual_outputs_identical`: eight greedy tokens of each prompt, through both routers, in every setting.
* `sim_error`: how far the simulator's ratio is from `dual_ttft_ratio`, as a part of it; for the other settings beside
  their rows. The simulator (`banyan_lab.sim.pair`) decides as the router does. It is given what was measured before the
  rounds: the rates that the servers report, the time of a request whose prefix is in the pool, and, where the decode
  server read all of a prompt, what that took beside its read.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from banyan_lab.sim.pair import Asked, PairRates, times_s
from benchmark.engine import Engine
from benchmark.metrics import spread
from benchmark.pd_servers import Pair
from benchmark.provenance import provenance
from benchmark.servers import Server, free_port, write_secret
from benchmark.store_server import prompts
from benchmark.warm import ForkedServer

NUM_PROMPTS = 12
PROMPT_TOKENS = 1600
NUM_ROUNDS = 4
DTYPE = ("--dtype", "float32")
"""Wherever this runs, so that pages have one size: of the tiny model 32 KiB, and a prompt 3.3 MB."""

LIMIT_MB_PER_S = "4"

PAUSE_S = 0.5
"""Before each request: twice what a router may not know yet of what the servers do."""

SAMPLE_S = 0.25
CALM_LOOKS, MOST_LOOKS = 4, 120
"""At the number of stored pages, one a second: so many alike mean that all is written; and how many at most."""

LIMITED = {"dual": ("prefill",), "split": ("prefill", "decode"), "unlimited": (), "agents": ("prefill",)}
"""Whose reads are limited, by setting; of the last one `pd_agents` tells."""

DECODE_HOST_GB = {"dual": "0.016", "split": "0.008", "unlimited": "0.016", "agents": "0.032"}
"""The decode server's arena, by setting: four times its part of one prompt, as it lends a quarter at most, and less
than its parts of the prompts that are asked in between. It would read nothing of what its arena still has."""

PREFILL_HOST_GB = {**dict.fromkeys(LIMITED, "0.006"), "agents": "0.012"}
PREFILL_POOL_TOKENS = {**dict.fromkeys(LIMITED, "4000"), "agents": "6000"}
DECODE_POOL_TOKENS = {**dict.fromkeys(LIMITED, "8000"), "agents": "24000"}
"""SGLang keeps 512 of these for each running request."""

ONE_AT_A_TIME = ("dual", "split", "unlimited")

KINDS = ("on", "off")


@dataclass(frozen=True)
class Setting:
    """A pair, and a router of each kind."""

    pair: Pair
    urls: Mapping[str, str]

    @property
    def prefill(self) -> Server:
        return self.pair.prefills[0]


@contextmanager
def started(name: str, model: Path, out: Path) -> Iterator[Setting]:
    store, page_server = out / "store", f"127.0.0.1:{free_port()}"
    shutil.rmtree(store, ignore_errors=True)
    secret = write_secret(out / "secret")
    common = (*DTYPE, "--banyan-secret-file", str(secret), "--banyan-plan", "move")
    limit = ("--banyan-store-read-mb-per-s", LIMIT_MB_PER_S)
    pair = Pair(
        f"dual-{name}",
        "on",
        model,
        out / "logs",
        store=store,
        kind=ForkedServer,
        prefill_args=(
            *common,
            *("--banyan-peers", page_server, "--banyan-host-gb", PREFILL_HOST_GB[name]),
            *("--max-total-tokens", PREFILL_POOL_TOKENS[name]),
            *(limit if "prefill" in LIMITED[name] else ()),
        ),
        decode_args=(
            *common,
            *("--banyan-listen", page_server, "--banyan-host-gb", DECODE_HOST_GB[name]),
            *("--max-total-tokens", DECODE_POOL_TOKENS[name]),
            *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
            *(limit if "decode" in LIMITED[name] else ()),
        ),
    )
    with pair, pair.routed() as on, pair.routed("--no-dual-path") as off:
        yield Setting(pair, {"on": on, "off": off})
    shutil.rmtree(store, ignore_errors=True)


class Queues:
    """The longest read queue that each server has told of, while this is open."""

    def __init__(self, servers: Mapping[str, Server]) -> None:
        self._servers = servers
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most_tokens = dict.fromkeys(servers, 0)

    def _run(self) -> None:
        while not self._has_ended.wait(SAMPLE_S):
            for side, server in self._servers.items():
                now = sum(load["read_queue_tokens"] for load in Engine(server.url).loads())
                self.most_tokens[side] = max(self.most_tokens[side], now)

    def __enter__(self) -> Queues:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()


def fill(setting: Setting, asked: Sequence[list[int]]) -> dict[int, list[int]]:
    """Have all prompts computed and stored, and known to both routers; what they are answered."""
    answers = {n: Engine(setting.urls["off"]).generate(ids, num_tokens=8)["output_ids"] for n, ids in enumerate(asked)}
    stored = [0]
    while len(stored) < CALM_LOOKS or stored[-1] != stored[-CALM_LOOKS] or not stored[-1]:
        if len(stored) > MOST_LOOKS:
            raise RuntimeError("the prompts are not stored")
        time.sleep(1.0)
        stored.append(setting.pair.total(setting.prefill, "archived_pages"))
    # The second time the router knows that they were sent before, and the drives are measured.
    for _ in range(2):
        for ids in asked:
            Engine(setting.urls["on"]).generate(ids)
    return answers


def read_bytes(setting: Setting) -> dict[str, int]:
    servers = _sides(setting)
    return {side: setting.pair.total(server, "read_bytes") for side, server in servers.items()}


def measure_rates(setting: Setting, asked: Sequence[list[int]]) -> tuple[PairRates, dict[str, list[float]]]:
    """What the simulator is given, and the times that it comes from.

    Raises:
        RuntimeError: when a server has not measured its reads.
    """
    pooled_s, through_decode_s = [], []
    # The first time through takes longer: no lesson.
    for is_counted, ids in itertools.product((False, True), asked):
        before = read_bytes(setting)
        time.sleep(PAUSE_S)
        first_s, _ = _timed(setting.urls["on"], ids)
        read = {side: after - before[side] for side, after in read_bytes(setting).items()}
        time.sleep(PAUSE_S)
        again_s, device_tokens = _timed(setting.urls["off"], ids)
        if not is_counted:
            continue
        if device_tokens > PROMPT_TOKENS / 2:
            pooled_s.append(again_s)
        if read["decode"] and not read["prefill"]:
            through_decode_s.append(first_s)
    rates = {side: _reported_rate(server) for side, server in _sides(setting).items()}
    if not all(rates.values()) or not pooled_s:
        raise RuntimeError(f"nothing to simulate with: rates {rates}, {len(pooled_s)} prompts found in the pool")
    known: dict[str, float] = {}
    # Means, as the ratios are of means.
    without_reads_s = statistics.mean(pooled_s)
    if through_decode_s:
        reading_s = PROMPT_TOKENS / rates["decode"]
        known["detour_s"] = max(0.0, statistics.mean(through_decode_s) - reading_s - without_reads_s)
    measured = PairRates(
        prefill_tokens_per_s=rates["prefill"],
        decode_tokens_per_s=rates["decode"],
        without_reads_s=without_reads_s,
        **known,
    )
    return measured, {"pooled_s": pooled_s, "through_decode_s": through_decode_s}


def _timed(url: str, ids: list[int]) -> tuple[float, int]:
    """Seconds, and tokens that the prefill server had in its pool."""
    start_s = time.perf_counter()
    answer = Engine(url).generate(ids)
    return time.perf_counter() - start_s, (answer["meta_info"].get("cached_tokens_details") or {}).get("device", 0)


def _sides(setting: Setting) -> dict[str, Server]:
    return {"prefill": setting.prefill, "decode": setting.pair.decode}


def _reported_rate(server: Server) -> float:
    """Tokens a second, as its router hears."""
    return float(sum(load["read_tokens_per_s"] for load in Engine(server.url).loads()))


def simulated(rows: Sequence[Mapping[str, Any]], rates: PairRates) -> list[dict[str, Any]]:
    """The same requests with the simulator's times. What was in the pool is not read."""
    asked = [
        Asked(
            at_s=1000.0 * number,
            stored_tokens=max(0, PROMPT_TOKENS - (row["details"] or {}).get("device", 0)),
            has_dual_path=row["kind"] == "on",
        )
        for number, row in enumerate(rows)
    ]
    return [{**row, "ttft_s": taken_s} for row, taken_s in zip(rows, times_s(asked, rates), strict=True)]


def sim_error(rows: Sequence[Mapping[str, Any]], rates: PairRates) -> float:
    """How far the simulator's ratio is from the measured one, as a part of it."""
    said, seen = (statistics.median(ratios(each)) for each in (simulated(rows, rates), rows))
    return round(abs(said / seen - 1), 4)


def measure_rounds(setting: Setting, asked: Sequence[list[int]]) -> list[dict[str, Any]]:
    """One row for each request."""
    rows = []
    for number in range(NUM_ROUNDS):
        for prompt, ids in enumerate(asked):
            kind = KINDS[(number + prompt) % 2]
            before = read_bytes(setting)
            time.sleep(PAUSE_S)
            start_s = time.perf_counter()
            answer = Engine(setting.urls[kind]).generate(ids)
            rows.append(
                {
                    "round": number,
                    "prompt": prompt,
                    "kind": kind,
                    "ttft_s": round(time.perf_counter() - start_s, 4),
                    "read_bytes": {side: after - before[side] for side, after in read_bytes(setting).items()},
                    "details": answer["meta_info"].get("cached_tokens_details"),
                }
            )
    return rows


def measure_setting(name: str, model: Path, out: Path, seed: int) -> dict[str, Any]:
    asked = prompts(model, [PROMPT_TOKENS] * NUM_PROMPTS, seed=seed)
    with started(name, model, out) as setting:
        servers = _sides(setting)
        answers = fill(setting, asked)
        # Beside both: to be asked takes time of the servers.
        with Queues(servers) as queues:
            rates, samples = measure_rates(setting, asked)
            rows = measure_rounds(setting, asked)
        is_identical = all(
            Engine(setting.urls[kind]).generate(ids, num_tokens=8)["output_ids"] == answers[number]
            for number, ids in enumerate(asked)
            for kind in KINDS
        )
        counters = {
            side: {
                word: setting.pair.total(server, word)
                for word in ("remote_prefetches", "remote_prefetches_sent", "remote_prefetches_failed")
            }
            for side, server in servers.items()
        }
    return {
        "provenance": provenance(),
        "sizes": {
            "num_prompts": NUM_PROMPTS,
            "prompt_tokens": PROMPT_TOKENS,
            "num_rounds": NUM_ROUNDS,
            "limit_mb_per_s": float(LIMIT_MB_PER_S),
            "pause_s": PAUSE_S,
        },
        "rows": rows,
        "rates": asdict(rates),
        "rate_samples": samples,
        "simulated_ratio": statistics.median(ratios(simulated(rows, rates))),
        "sim_error": sim_error(rows, rates),
        "num_pooled_rows": sum(map(was_pooled, rows)),
        "is_identical": is_identical,
        "counters": counters,
        "most_read_queue_tokens": queues.most_tokens,
    }


def was_pooled(row: Mapping[str, Any]) -> bool:
    """Whether more than half of the prompt was in the prefill server's own pool."""
    return (row["details"] or {}).get("device", 0) > PROMPT_TOKENS / 2


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """By two rounds, which have asked every prompt both ways: mean time with the dual path to without. Prompts that the
    prefill server's pool still had count in neither."""
    found = []
    for number in range(0, NUM_ROUNDS, 2):
        pooled = {row["prompt"] for row in rows if was_pooled(row) and row["round"] in (number, number + 1)}
        both = [row for row in rows if row["round"] in (number, number + 1) and row["prompt"] not in pooled]
        means = [statistics.mean(row["ttft_s"] for row in both if row["kind"] == kind) for kind in KINDS]
        found.append(means[0] / means[1])
    return found


def balance(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Of the bytes that both sides have read with the dual path on: the larger part to the mean."""
    sums = [sum(row["read_bytes"][side] for row in rows if row["kind"] == "on") for side in ("prefill", "decode")]
    return round(max(sums) / statistics.mean(sums), 4) if sum(sums) else None


def figures(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of the settings that were measured, but agents."""
    found = {name: one for name, one in found.items() if name in ONE_AT_A_TIME}
    if not found:
        return {}
    titles = {"dual": "dual_ttft_ratio", "split": "split_ratio", "unlimited": "unlimited_ratio"}
    told: dict[str, Any] = {titles[name]: spread(ratios(one["rows"])) for name, one in found.items()}
    if "split" in found:
        told["read_balance_max_over_mean"] = balance(found["split"]["rows"])
    if "sim_error" in found.get("dual", {}):
        told["sim_error"] = found["dual"]["sim_error"]
    return {
        **told,
        "dual_outputs_identical": all(one["is_identical"] for one in found.values()),
        "dual_settings": {name: {k: v for k, v in one.items() if k != "rows"} for name, one in found.items()},
    }
