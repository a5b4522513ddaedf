# SPDX-License-Identifier: Apache-2.0
"""From which prompt length on separated workers pay: Dynamo's break-even table, simulated, and with equal GPUs.

The source does not say how many workers it compares. Its figures do: ten requests in flight at 204 output tokens/s of
50 each are 4.1 requests/s, and a prefill of 173 ms allows one worker 5.8; 1P1D's 5.0 are near the bound of its one
prefill worker. So one aggregated worker stands against 1P1D, half of the GPUs against all. A worker's prefill rate and
its decode step are taken from the latencies that the source gives for prompts of 8,000; they are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import count

from banyan.routing import POLICIES
from banyan_lab.sim.compute import DecodeModel, PrefillModel, Rates, kv_room_bytes
from banyan_lab.sim.dp_node import DpNode
from banyan_lab.sim.dp_rank import DpSite, Evicts, Request
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.figures import DYNAMO, Figure, relative
from banyan_lab.sim.hardware import Gpu, gpu, table
from banyan_lab.sim.llms import Llm, llm

PUBLISHED = {1000: (0.0, -7.0), 2000: (3.0, -11.0), 4000: (14.0, -18.0), 8000: (22.0, -41.0)}
"""By prompt length: gain of output tokens per second, and change of the time between tokens, in percent."""

PAGE_TOKENS = 64
WARM_REQUESTS, NUM_REQUESTS = 100, 600
NOTE = (
    "chunks of 8,192 tokens, one prompt at a time; the source gives neither the chunk nor the GPUs of a worker; hinges "
    "on the prefill worker, which loses a seventh under load there and nothing here"
)


BUSY_PREFILL = "248 tokens/s are 202 ms for each prompt on the one prefill worker, ours takes its 173 ms under load too"

ONE_WORKER, SEPARATED, TWO_WORKERS = (1, 0), (2, 1), (2, 0)
"""Workers, and how many of them decode only."""

LOW_TOKENS, HIGH_TOKENS, STEPS = 500, 16_000, 6


@dataclass(frozen=True, slots=True)
class Answered:
    """Means of one run; TTFT holds the hand-over, as a client sees it."""

    tokens_per_s: float
    ttft_s: float
    itl_s: float


def site(num_workers: int, num_decode_only: int) -> DpSite:
    """Workers of two H100s as the source's prefill time makes them; each is one rank."""
    seen, model, chip = table("engines")["dynamo"], llm("llama3-8b"), gpu("H100")
    flops = model.prefill_flops(new_tokens=seen["prompt_tokens"], cached_tokens=0)
    prefill = PrefillModel(model, flops / seen["prefill_s"])
    wide = seen["gpus_of_worker"]
    worker = replace(chip, hbm_bytes=wide * chip.hbm_bytes, hbm_bytes_per_s=wide * chip.hbm_bytes_per_s)
    return DpSite(
        num_ranks=num_workers,
        num_decode_only=num_decode_only,
        shares=False,
        arena_pages=0,
        evicts=Evicts.BY_AGE,
        pool_tokens=int(kv_room_bytes(model, worker, num_gpus=1) / model.kv_bytes_per_token),
        page_tokens=PAGE_TOKENS,
        prefill=prefill,
        mixes=True,
        decode=_decode(model, worker, prefill),
        copy_bytes_per_s=seen["kv_bytes_per_s"],
    )


def _decode(model: Llm, worker: Gpu, prefill: PrefillModel) -> DecodeModel:
    """Steps as long as the separated decode worker's, with as many requests in them as there were."""
    seen = table("engines")["dynamo"]
    batch = seen["output_tokens_per_s"] * seen["token_s"]
    bare = DecodeModel(model, worker, model.weight_bytes, Rates(prefill.flops_per_s, 0.0))
    rest_s = seen["token_s"] - bare.step_s(num_requests=batch, context_tokens=batch * seen["prompt_tokens"])
    return replace(bare, rates=Rates(prefill.flops_per_s, rest_s / model.num_layers))


def answered(
    here: DpSite, prompt_tokens: int, *, concurrency: int, output_tokens: int, num_requests: int = NUM_REQUESTS
) -> Answered:
    """So many requests are always in flight, and no prompt is like another. The first ones are not counted."""
    sim = Simulation()
    ended: list[tuple[float, float, float]] = []

    numbers = count()

    def submit() -> None:
        number = next(numbers)
        pages = [f"{number}/{place}" for place in range(prompt_tokens // PAGE_TOKENS)]
        node.submit(str(number), pages, prompt_tokens, output_tokens)

    def done(request: Request, now_s: float) -> None:
        # The first token is the prefill side's; a client of separated workers hears of it from the decode side.
        itl_s = (now_s - request.begun_decode_s) / (request.output_tokens - 1)
        ended.append((now_s, request.begun_decode_s - request.arrived_s, itl_s))
        if len(ended) < num_requests:
            sim.after(0.0, submit)

    node = DpNode(sim, here, POLICIES["lmetric"](), done=done)
    for _ in range(concurrency):
        sim.after(0.0, submit)
    sim.run()
    node.audit()
    first = min(WARM_REQUESTS, num_requests // 4)
    # Those that end when nothing is sent any more say nothing of the load.
    counted = ended[first:num_requests]
    span_s = counted[-1][0] - ended[first - 1][0]
    return Answered(
        output_tokens * len(counted) / span_s,
        sum(row[1] for row in counted) / len(counted),
        sum(row[2] for row in counted) / len(counted),
    )


@cache
def run(workers: tuple[int, int], prompt_tokens: int) -> Answered:
    """At the source's concurrency and length of answers."""
    seen = table("engines")["dynamo"]
    return answered(site(*workers), prompt_tokens, concurrency=seen["concurrency"], output_tokens=seen["output_tokens"])


def gain(prompt_tokens: int, against: tuple[int, int] = ONE_WORKER) -> float:
    """Output tokens per second of 1P1D over those of combined workers, in percent more."""
    return 100 * (run(SEPARATED, prompt_tokens).tokens_per_s / run(against, prompt_tokens).tokens_per_s - 1)


def length_with(gain_percent: float) -> float:
    """The prompt length from which on 1P1D gains so much over one worker, by bisection."""
    low, high = LOW_TOKENS, HIGH_TOKENS
    for _ in range(STEPS):
        middle = round((low * high) ** 0.5)
        if gain(middle) < gain_percent:
            low = middle
        else:
            high = middle
    return float(high)


def figures() -> Iterator[Figure]:
    yield from _by_length()
    yield Figure(
        name=f"prompt length from which on 1P1D gains {PUBLISHED[4000][0]:g} % over one worker",
        published=4000.0,
        simulated=length_with(PUBLISHED[4000][0]),
        unit="tokens",
        source=f"{DYNAMO}: separate from 4,000 tokens on",
        within=600.0,
        note=NOTE,
    )
    yield from _absolute()


def _by_length() -> Iterator[Figure]:
    for tokens, (more, change) in PUBLISHED.items():
        combined, separated = run(ONE_WORKER, tokens), run(SEPARATED, tokens)
        for name, published, value in (
            ("output tokens per second, 1P1D over one worker", more, gain(tokens)),
            (
                "time between tokens, 1P1D over one worker",
                change,
                100 * (separated.itl_s / combined.itl_s - 1),
            ),
        ):
            yield Figure(
                name=f"prompts of {tokens}: {name}",
                published=published,
                simulated=value,
                unit="% more",
                source=f"{DYNAMO}, by prompt length",
                within=10.0,
                note=NOTE,
            )
        yield Figure(
            name=f"prompts of {tokens}: output tokens per second, 1P1D over two combined workers",
            published=None,
            simulated=gain(tokens, TWO_WORKERS),
            unit="% more",
            source="the same with equal GPUs, which nobody published",
        )


def _absolute() -> Iterator[Figure]:
    tokens = table("engines")["dynamo"]["prompt_tokens"]
    combined, separated = run(ONE_WORKER, tokens), run(SEPARATED, tokens)
    for name, published, value, unit, note in (
        ("output tokens per second, one worker", 204.0, combined.tokens_per_s, "1/s", ""),
        ("output tokens per second, 1P1D", 248.0, separated.tokens_per_s, "1/s", BUSY_PREFILL),
        ("time between tokens, one worker", 28.5, 1e3 * combined.itl_s, "ms", "hinges on how prefills are cut"),
    ):
        yield Figure(
            name=f"prompts of {tokens}: {name}",
            published=published,
            simulated=value,
            unit=unit,
            source=f"{DYNAMO}, break-even analysis",
            within=relative(published, 0.15),
            note=note,
        )
    alone = [
        answered(site(*workers), tokens, concurrency=1, output_tokens=2, num_requests=8).ttft_s
        for workers in (ONE_WORKER, SEPARATED)
    ]
    yield Figure(
        name=f"prompts of {tokens}: cost of the hand-over",
        published=37.0,
        simulated=1e3 * (alone[1] - alone[0]),
        unit="ms",
        source=f"{DYNAMO}: 173 to 210 ms, 9.6 GB/s",
        within=relative(37.0, 0.15),
        note="1.05 GB of KV take 109 ms at the published 9.6 GB/s; in 37 ms two thirds of it are hidden, which is not "
        "modelled here",
    )
