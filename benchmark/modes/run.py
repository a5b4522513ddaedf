# SPDX-License-Identifier: Apache-2.0
"""One row: start its servers, ask, compare, and say what came of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from banyan import config
from benchmark.modes import asking, models, paired, pictures, program
from benchmark.modes.asking import Answer, Ask
from benchmark.modes.by_grpc import GrpcServer
from benchmark.modes.rows import ADAPTER, DRAFT, DRAFT_OF_LAYERS, MODEL, PORT, Mode
from benchmark.servers import SHARE_FLAGS, Server, ServerFailed, ServerSpec, cpu_env, free_port, wait_ready
from benchmark.warm import ForkedServer

NUM_CORES = 2
REFUSED = "banyan: refused: "
ERROR = re.compile(r"\w*(Error|Exception)\b.*: ")
PAGE_TOKENS = 16
STORED_WITHIN_S = 60.0
PLAN = ("--banyan-plan", "move")
UNPINNED = ("vectors", "tokens by gRPC")
"""What cannot be asked of a rank by name."""

ENV = (
    # A page outside of allocator, tree and requests ends the server: leaks cannot pass.
    ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1"),
    # SGLang opens NCCL for every group of more than one process, on a CPU too, where it has no device to use.
    ("SGLANG_NCCL_SO_PATH", "/nonexistent"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of a row; `line` is a refusal's, or the reason of a failure."""

    verdict: str
    outputs_identical: bool | None = None
    tokens_from: dict[str, int] | None = None
    line: str = ""
    largest_logit_difference: float | None = None
    """Between answers of ranks that work together and of ranks that work alone, for ranks in step."""
    share_of_one_rank: float | None = None
    """Cached tokens of the second round, of those that one rank alone finds again."""
    wall_s: float = 0.0


def run(mode: Mode, out: Path) -> Found:
    """Start the servers of `mode` and ask them; logs go to `out`."""
    started_s = time.monotonic()
    folder = out / _slug(mode.name)
    folder.mkdir(parents=True, exist_ok=True)
    if mode.verdict == "needs":
        return Found(verdict="needs", line=mode.needs)
    try:
        if mode.answer == "tokens of a program":
            found = _programs(mode, folder)
        elif mode.answer == "tokens of a pair":
            found = _pair(mode, folder)
        else:
            found = _refusal(mode, folder) if mode.verdict == "refused" else _served(mode, folder)
    except ServerFailed as error:
        found = ended((folder / f"{error.label}.log").read_text(errors="replace"))
    except OSError as error:
        # A server that was up is gone in the middle of a question, and its log says why.
        log = folder / "on.log"
        found = ended(log.read_text(errors="replace")) if log.exists() else Found(verdict="crashed", line=str(error))
    return replace(found, wall_s=round(time.monotonic() - started_s, 1))


def _refusal(mode: Mode, folder: Path) -> Found:
    """A server that must end by itself, with its reason in a line."""
    with ForkedServer(_spec(mode, mode.flags, folder, shares=True), _model(mode), folder) as server:
        wait_ready([server])
    return Found(verdict="served")


def ended(log: str) -> Found:
    """What a server that did not come up said: a refusal in one line, or else a crash, with its first error."""
    lines = log.splitlines()
    for line in lines:
        if REFUSED in line:
            return Found(verdict="refused", line=line.partition(REFUSED)[2].strip())
    errors = [line for line in lines if ERROR.match(line)]
    return Found(verdict="crashed", line=(errors or lines[-1:] or ["no word"])[0])


def _served(mode: Mode, folder: Path) -> Found:
    asked = asking.prompts()
    if mode.answer in UNPINNED:
        # Ranks take turns: an odd number comes to the other one when it is asked again.
        del asked[-1]
    specs = _specs(mode, folder)
    kind = GrpcServer if mode.answer == "tokens by gRPC" else ForkedServer
    on, off = (kind(spec, _model(mode), folder) for spec in specs)
    with on, off:
        wait_ready([on, off])
        if mode.gives_memory:
            for server in (on, off):
                _give_memory(_ask(mode, server), server.url)
        off_ranks = mode.num_ranks if mode.alone is None else 1
        theirs = asking.in_turn(_ask(mode, off), off_ranks, asked)
        ours = asking.in_turn(_ask(mode, on), mode.num_ranks, asked)
        apart = _apart(mode, on, off) if mode.alone is None else None
        if mode.answer in UNPINNED:
            ours[0] = replace(ours[0], cached={"peer": _peer_tokens(on)})
        if mode.restarted:
            _wait_stored(mode, on.url, asked)
    if mode.restarted:
        # Each prompt once, all of them from what the first server left.
        with ForkedServer(replace(specs[0], label="on-again"), _model(mode), folder) as again:
            wait_ready([again])
            ours = [_ask(mode, again)(ids, number % mode.num_ranks) for number, ids in enumerate(asked)]
        theirs = theirs[: len(ours)]
    return _compared(mode, ours, theirs, apart)


def _give_memory(ask: Ask, url: str) -> None:
    """As a trainer does with a server that has answered: its memory goes, all of it, and comes again."""
    ask(asking.prompts(2 * asking.NUM_PROMPTS)[-1], None)
    for command in ("release_memory_occupation", "resume_memory_occupation"):
        request = urllib.request.Request(f"{url}/{command}", b"{}", {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=asking.TIMEOUT_S) as response:
            response.read()


def _programs(mode: Mode, folder: Path) -> Found:
    """Programs in place of servers: one that shares, one that does not."""
    answers = []
    for spec in _specs(mode, folder):
        out, log = folder / f"{spec.label}.json", folder / f"{spec.label}.log"
        arguments = {
            "model_path": str(_model(mode)),
            "device": "cpu",
            "dp_size": spec.dp,
            "max_total_tokens": mode.pool_tokens,
            "context_length": models.MAX_TOKENS,
            "port": free_port(),
        }
        command = ["-m", "benchmark.modes.program", str(out), str(spec.dp), json.dumps(arguments)]
        words = {config.FLAGS_VARIABLE: " ".join((*SHARE_FLAGS[spec.share], *PLAN))}
        with open(log, "wb") as file:
            ended_with = subprocess.run(
                [sys.executable, *command],
                env={**os.environ, **dict(spec.env), **words},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        if ended_with.returncode:
            return ended(log.read_text(errors="replace"))
        answers.append(program.read(out))
    return _compared(mode, *answers, None)


def _pair(mode: Mode, folder: Path) -> Found:
    """A pair, and one server that shares nothing and has room for all that it is asked."""
    asked = asking.prompts()
    ours = paired.answers(mode, _model(mode), folder, asked, env=ENV)
    alone = replace(mode, pool_tokens=paired.ALONE_POOL_TOKENS)
    with ForkedServer(_specs(alone, folder)[1], _model(mode), folder) as server:
        wait_ready([server])
        theirs = paired.two_turns(asking.tokens(server.url), asked)
    return _compared(mode, ours, theirs, None)


def _compared(mode: Mode, ours: Sequence[Answer], theirs: Sequence[Answer], apart: float | None) -> Found:
    found = asking.tokens_from(ours)
    alone = asking.tokens_from(theirs)
    half = len(ours) // 2
    # A read of the store that has ended when its request is scheduled has come by way of the arena, empty before it.
    num_found = found[mode.source] + (found["host"] if mode.restarted else 0)
    return Found(
        verdict="served" if num_found > 0 else "useless",
        outputs_identical=asking.differences(ours, theirs) == 0,
        tokens_from=found,
        largest_logit_difference=apart,
        share_of_one_rank=None
        if mode.alone is None or not sum(alone.values())
        else round(_found_again(ours[half:]) / max(1, _found_again(theirs[half:])), 3),
    )


def _found_again(answers: Sequence[Answer]) -> int:
    return sum(asking.tokens_from(answers).values())


def _apart(mode: Mode, on: Server, off: Server) -> float:
    """How far answers move when the ranks work together, where their rows meet in one matrix product: prompts that
    nobody has seen, at all ranks at once, against the same at one rank while the others idle.
    """
    asked = asking.prompts(2 * asking.NUM_PROMPTS)[asking.NUM_PROMPTS :]
    alone = [_ask(mode, off)(ids, 0) for ids in asked]
    return asking.widest(asking.together(_ask(mode, on), mode.num_ranks, asked), alone)


def _ask(mode: Mode, server: Server) -> Ask:
    if isinstance(server, GrpcServer):
        return server.tokens()
    if mode.answer == "vectors":
        return asking.vectors(server.url)
    if mode.answer == "drafted tokens":
        return asking.drafted_tokens(server.url)
    if mode.answer == "tokens of a grammar":
        return asking.tokens_of_a_grammar(server.url)
    if mode.answer == "tokens about a picture":
        return pictures.tokens(server.url)
    return asking.tokens(server.url, adapter="tiny" if mode.answer == "adapter tokens" else None)


def _wait_stored(mode: Mode, url: str, asked: Sequence[Sequence[int]]) -> None:
    """Return when the store holds as many pages as the prompts fill, or STORED_WITHIN_S have passed."""
    more = pictures.NUM_MORE_TOKENS if mode.answer == "tokens about a picture" else 0
    wanted = sum((len(ids) + more) // PAGE_TOKENS for ids in asked)
    if mode.model == "state":
        # SGLang keeps a prompt as far as there is a state, and that state.
        wanted = sum(len(ids) // models.STATE_TOKENS * (models.STATE_TOKENS // PAGE_TOKENS) + 1 for ids in asked)
    if mode.model == "window":
        # Of window pages SGLang keeps those at the end of each prompt.
        wanted += len(asked) * (models.WINDOW_TOKENS // PAGE_TOKENS + 1)
    deadline_s = time.monotonic() + STORED_WITHIN_S
    while time.monotonic() < deadline_s:
        if sum(rank["archived_pages"] for rank in _ranks(url)) >= wanted:
            return
        time.sleep(0.5)


def _peer_tokens(server: Server) -> int:
    """As the ranks count them, where answers do not say where cached tokens came from."""
    if isinstance(server, GrpcServer):
        return server.peer_tokens()
    return sum(rank["fetched_pages"] for rank in _ranks(server.url)) * PAGE_TOKENS


def _ranks(url: str) -> list[dict[str, Any]]:
    """What Banyan says of each rank."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=30) as response:
        return [state["banyan"] for state in json.load(response)["internal_states"]]


def _specs(mode: Mode, folder: Path) -> list[ServerSpec]:
    """The server that shares, and the one that it is compared with."""
    alone = mode.flags if mode.alone is None else mode.alone
    return [_spec(mode, mode.flags, folder, shares=True), _spec(mode, alone, folder, shares=False)]


def _spec(mode: Mode, flags: Sequence[str], folder: Path, *, shares: bool) -> ServerSpec:
    """`--dp` is given by the spec itself."""
    rest = [_filled_in(flag, mode).replace("{folder}", str(folder)).replace(PORT, str(free_port())) for flag in flags]
    dp = 1
    if "--dp" in rest:
        at = rest.index("--dp")
        dp = int(rest[at + 1])
        del rest[at : at + 2]
    common = (
        *("--device", "cpu", "--max-total-tokens", str(mode.pool_tokens), "--context-length", str(models.MAX_TOKENS)),
        *("--sleep-on-idle", *PLAN),
    )
    num_processes = dp * (int(rest[rest.index("--tp") + 1]) if "--tp" in rest else 1)
    env = dict((*cpu_env(dp=num_processes, num_cores=NUM_CORES), *ENV, *mode.env))
    return ServerSpec("on" if shares else "off", dp, "on" if shares else "off", (*common, *rest), tuple(env.items()))


def _model(mode: Mode) -> Path:
    if mode.model == "vision":
        return pictures.ensure()
    return models.ensure({shape.name: shape for shape in models.SHAPES}[mode.model])


def _filled_in(flag: str, mode: Mode) -> str:
    """A flag with the checkpoint that it names."""
    made = (
        (ADAPTER, models.ensure_adapter),
        (MODEL, lambda: _model(mode)),
        (DRAFT, models.ensure_draft),
        (DRAFT_OF_LAYERS, models.ensure_draft_of_layers),
    )
    for name, ensure in made:
        if name in flag:
            return flag.replace(name, str(ensure()))
    return flag


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())
