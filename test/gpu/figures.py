# SPDX-License-Identifier: Apache-2.0
"""What sharing gives and costs on this GPU with a model of the shape of Llama 3 8B: two servers of two ranks, alike but
for ``--banyan-share``, asked in turns.

    python test/gpu/figures.py [--layers N] [--log DIR] [-- further arguments]

Weights are drawn by SGLang (``--load-format dummy``): nothing is read but a configuration, and tokens mean nothing.
Three questions: when the first token comes for a prompt that the other rank has computed; what streams notice while
their rank takes such prompts; what it costs where nothing is shared. Each answer is printed as one line of JSON when it
is there; medians, with the smallest and the largest. The exit status is 1 if a prompt is not there sooner than it is
computed, if sharing costs much where nothing is shared, or if a stream waits much longer for a token. A GPU that does
not hold both servers gets a model of fewer layers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from engine import ONE_GPU, Answer, Server, end_on_termination
from server_check import verdict_line
from steps import GRAPHS

SHARES = ("peer", "off")
HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS = 4096, 14336, 32, 8
CONTEXT_TOKENS = 32768
POOL_TOKENS = 65536
FIRST_TOKEN, LAST_TOKEN = 10, 250
PROMPT_TOKENS = (8192, 16384)
SETTLE_S = 0.5
"""Pages are published a step after they are written."""

NUM_STREAMS, STREAM_TOKENS, STREAM_PROMPT_TOKENS = 16, 96, 256
NUM_TAKEN, TAKEN_TOKENS = 3, 8192
NUM_ALONE, ALONE_TOKENS, ALONE_AT_ONCE = 48, 512, 8


RANK_BYTES = 25 << 30
"""Weights, pool and graphs of a rank with all layers."""
ALL_LAYERS, FEW_LAYERS = 32, 8

LEAST_THROUGHPUT, MOST_GAP = 0.95, 1.05
"""Of what there is without sharing, where nothing is shared."""

LONGEST_GAP, LONGEST_GAP_MS = 2.0, 20.0
"""The longest time between two tokens of a stream may be so many times that without sharing, and as much: a call that
others' locks hold up shows there and nowhere else."""

Found = dict[str, dict[str, list[float]]]
"""By server and name: a value for each round."""


def num_layers_that_fit(all_gpus: bool) -> int:
    import torch

    num_ranks = len(SHARES) if all_gpus else 2 * len(SHARES)
    return ALL_LAYERS if num_ranks * RANK_BYTES < torch.cuda.mem_get_info()[0] else FEW_LAYERS


def verdict(alone: Found, first_tokens: Sequence[Found], beside: Found) -> dict[str, bool]:
    def ratio(found: Found, name: str) -> float:
        on, off = (statistics.median(found[share][name]) for share in SHARES)
        return on / off

    def is_held_up(name: str) -> bool:
        on, off = (max(beside[share][name]) for share in SHARES)
        return on > LONGEST_GAP * off + LONGEST_GAP_MS

    return {
        "prompts_are_there_sooner_than_computed": all(ratio(found, "other_rank_ms") < 1 for found in first_tokens),
        "as_many_requests_where_nothing_is_shared": ratio(alone, "requests_per_s") >= LEAST_THROUGHPUT,
        "tokens_come_as_fast_where_nothing_is_shared": ratio(alone, "itl_p50_ms") <= MOST_GAP,
        "no_token_comes_much_later": not any(map(is_held_up, ("alone_itl_max_ms", "beside_itl_max_ms"))),
    }


def write_model(folder: Path, num_layers: int) -> Path:
    """A configuration and a tokenizer."""
    from transformers import LlamaConfig

    from benchmark.modes import models

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=num_layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=CONTEXT_TOKENS,
        vocab_size=models.VOCABULARY,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
    ).save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return folder


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


class Figures:
    """Both servers, and prompts that were never asked before."""

    def __init__(self, servers: dict[str, Server], num_rounds: int) -> None:
        self._servers, self._num_rounds = servers, num_rounds
        self._chance = random.Random(7)

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._chance.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(num_tokens)]

    def rounds(self, play: Callable[[Server, int], dict[str, float]]) -> Found:
        """What ``play`` found, by server and name. The first round warms up. The server that begins changes."""
        found: Found = {share: {} for share in SHARES}
        for number in range(-1, self._num_rounds):
            for share in SHARES if number % 2 else SHARES[::-1]:
                for name, value in play(self._servers[share], number).items():
                    if number >= 0:
                        found[share].setdefault(name, []).append(value)
        return found

    def first_token(self, num_tokens: int) -> Found:
        """A prompt on rank 0, the same on rank 1, and there once more."""
        prompts = {number: self.prompt(num_tokens) for number in range(-1, self._num_rounds)}

        def play(server: Server, number: int) -> dict[str, float]:
            computed = server.generate(prompts[number], 0, 1)
            time.sleep(SETTLE_S)
            elsewhere = server.generate(prompts[number], 1, 1)
            own = server.generate(prompts[number], 1, 1)
            return {
                "computed_ms": computed.ttft_s * 1e3,
                "other_rank_ms": elsewhere.ttft_s * 1e3,
                "own_hit_ms": own.ttft_s * 1e3,
                "fetched_tokens": elsewhere.cached.get("peer", 0),
            }

        return self.rounds(play)

    def beside_streams(self) -> Found:
        """Streams on rank 1, alone and while it takes long prompts that rank 0 has computed."""
        numbers = range(-1, self._num_rounds)
        prompts = {number: [self.prompt(TAKEN_TOKENS) for _ in range(NUM_TAKEN)] for number in numbers}
        streamed = {number: [self.prompt(STREAM_PROMPT_TOKENS) for _ in range(2 * NUM_STREAMS)] for number in numbers}

        def stream(server: Server, asked: Sequence[list[int]], taken: Sequence[list[int]]) -> list[float]:
            with ThreadPoolExecutor(NUM_STREAMS + 1) as executor:
                streams = [executor.submit(server.generate, ids, 1, STREAM_TOKENS) for ids in asked]
                time.sleep(0.3)
                for ids in taken:
                    server.generate(ids, 1, 1)
                return sorted(gap for each in streams for gap in each.result().gaps_s)

        def play(server: Server, number: int) -> dict[str, float]:
            for ids in prompts[number]:
                server.generate(ids, 0, 1)
            alone = stream(server, streamed[number][:NUM_STREAMS], ())
            beside = stream(server, streamed[number][NUM_STREAMS:], prompts[number])
            return {
                f"{name}_itl_{word}_ms": gaps[min(len(gaps) - 1, int(share * len(gaps)))] * 1e3
                for name, gaps in (("alone", alone), ("beside", beside))
                for word, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
            }

        return self.rounds(play)

    def alone(self) -> Found:
        """Prompts that nobody shares, on both ranks."""
        prompts = {n: [self.prompt(ALONE_TOKENS) for _ in range(NUM_ALONE)] for n in range(-1, self._num_rounds)}

        def play(server: Server, number: int) -> dict[str, float]:
            began_s = time.perf_counter()
            with ThreadPoolExecutor(2 * ALONE_AT_ONCE) as executor:
                asked = [
                    executor.submit(server.generate, ids, position % 2, 16)
                    for position, ids in enumerate(prompts[number])
                ]
                answers: list[Answer] = [each.result() for each in asked]
            return {
                "requests_per_s": len(answers) / (time.perf_counter() - began_s),
                "ttft_p50_ms": statistics.median(answer.ttft_s for answer in answers) * 1e3,
                "itl_p50_ms": statistics.median(gap for answer in answers for gap in answer.gaps_s) * 1e3,
            }

        return self.rounds(play)


def say(what: str, found: Found, **more: object) -> Found:
    row = {share: {name: spread(values) for name, values in one.items()} for share, one in found.items()}
    print(json.dumps({"what": what, **more, **row}), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, help="of the model (default: 32, or 8 where they do not fit)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=PROMPT_TOKENS)
    parser.add_argument("--all-gpus", action="store_true", help="rank r on GPU r, not all on the first")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--log", type=Path, default=Path("build/gpu/figures"))
    parser.add_argument("further", nargs="*")
    args = parser.parse_args()
    end_on_termination()
    args.log.mkdir(parents=True, exist_ok=True)
    num_layers = args.layers or num_layers_that_fit(args.all_gpus)
    model_path = str(write_model(args.log / "model", num_layers))
    common = [
        *("--load-format", "dummy", "--dtype", "bfloat16", "--banyan-plan", "measured"),
        *("--mem-fraction-static", "0.95"),  # Tokens bound the pools; what the other ranks take counts as taken.
        *("--max-total-tokens", str(POOL_TOKENS), "--context-length", str(CONTEXT_TOKENS)),
        *("--chunked-prefill-size", "8192", *GRAPHS.split(), *args.further),
    ]
    with ExitStack() as stack:
        servers = {}
        for share in SHARES:
            servers[share] = Server(
                model_path,
                log=args.log / f"server-{share}.log",
                further=["--banyan-share", share, *common],
                plugins=[] if args.all_gpus else [ONE_GPU],
            )
            stack.callback(servers[share].stop)
        for server in servers.values():
            server.wait_until_up(args.seconds)
        figures = Figures(servers, args.rounds)
        print(json.dumps({"what": "model", "layers": num_layers}), flush=True)
        alone = say("nothing shared", figures.alone(), prompt_tokens=ALONE_TOKENS, at_once=2 * ALONE_AT_ONCE)
        first_tokens = [
            say("first token", figures.first_token(num_tokens), prompt_tokens=num_tokens)
            for num_tokens in args.prompt_tokens
        ]
        beside = say("streams beside", figures.beside_streams(), streams=NUM_STREAMS, taken_tokens=TAKEN_TOKENS)
        print(json.dumps({"what": "ranks", "states": servers["peer"].rank_states()}), flush=True)
    found = verdict(alone, first_tokens, beside)
    print(json.dumps({"verdict": found}))
    print(f"verdict: {verdict_line(found)}", file=sys.stderr)
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
