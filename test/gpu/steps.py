# SPDX-License-Identifier: Apache-2.0
"""The steps of ``make gpu-check``, what each needs, and what is known of each: pure.

Every step fits into ``LIMIT_S``. A step that was proved for this commit on this GPU is not done again; one that failed
is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

LIMIT_S = 480

STAND_IN_NAME = "a stand-in"
"""What stands in for a GPU says it is."""

PROVED, FAILED, NOT_POSSIBLE = "proved", "failed", "not possible here"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the machine has. ``modules`` are those of Python that can be imported, ``tools`` programs that are there;
    ``no_gpu`` says why no step can run, where none can."""

    commit: str
    gpu: str
    num_gpus: int
    apart: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs that do not read each other, the lesser number first."""
    modules: frozenset[str] = frozenset()
    tools: frozenset[str] = frozenset()
    missing_to_compile: tuple[str, ...] = ()
    model_path: str = ""
    mla_model_path: str = ""
    dsa_model_path: str = ""
    draft_model_path: str = ""
    window_model_path: str = ""
    state_model_path: str = ""
    mtp_model_path: str = ""
    sm: int = 0
    no_gpu: str = ""

    @property
    def key(self) -> str:
        """What a proof holds for."""
        return f"{self.commit} on {self.gpu}"


Need = Callable[[Facts], str | None]
"""Why a step is not possible; None when it is."""


def module(name: str) -> Need:
    return lambda facts: None if name in facts.modules else f"no Python module {name}"


def tool(name: str) -> Need:
    return lambda facts: None if name in facts.tools else f"no {name}"


def server(facts: Facts) -> str | None:
    if "sglang" not in facts.modules:
        return "no SGLang"
    if "sgl_kernel" not in facts.modules:
        return "SGLang's kernels are not installed: no Python module sgl_kernel"
    if facts.missing_to_compile:
        return f"SGLang cannot compile: no {', '.join(facts.missing_to_compile)}"
    return None


def model(facts: Facts) -> str | None:
    return None if facts.model_path else "MODEL_PATH is not set"


def mla_model(facts: Facts) -> str | None:
    return None if facts.mla_model_path else "MLA_MODEL_PATH is not set"


def dsa_model(facts: Facts) -> str | None:
    return None if facts.dsa_model_path else "DSA_MODEL_PATH is not set"


def window_model(facts: Facts) -> str | None:
    return None if facts.window_model_path else "WINDOW_MODEL_PATH is not set"


def state_model(facts: Facts) -> str | None:
    return None if facts.state_model_path else "STATE_MODEL_PATH is not set"


def mtp_model(facts: Facts) -> str | None:
    return None if facts.mtp_model_path else "MTP_MODEL_PATH is not set"


def draft_model(facts: Facts) -> str | None:
    return None if facts.draft_model_path else "DRAFT_MODEL_PATH is not set"


def runs_fa3(facts: Facts) -> str | None:
    return None if 80 <= facts.sm <= 90 else f"FA3 is for SM 80 to 90, this is SM {facts.sm}"


FA3: tuple[Need, ...] = (module("sgl_kernel.flash_attn"), runs_fa3)


def two_gpus(facts: Facts) -> str | None:
    return None if facts.num_gpus > 1 else "one GPU"


def four_gpus(facts: Facts) -> str | None:
    return None if facts.num_gpus > 3 else f"{facts.num_gpus} GPU(s), of four"


def reading(*pairs: tuple[int, int]) -> Need:
    """That the GPUs of each pair read each other; what others do says nothing."""
    return lambda facts: next(
        (f"GPUs {a} and {b} cannot read each other" for a, b in pairs if (a, b) in facts.apart), None
    )


peer_access = reading((0, 1))
peer_access_by_shard = reading((0, 2), (1, 3))
"""Of two ranks with two shards: a shard reads its like."""


def no_peer_access(facts: Facts) -> str | None:
    return None if facts.apart else "there are no GPUs that cannot read each other"


@dataclass(frozen=True, slots=True)
class Step:
    """``command`` without the interpreter; ``arguments`` fills in ``{out}``, the names of ``MODELS``, and in place of
    ``{apart}`` two GPUs that do not read each other."""

    name: str
    command: tuple[str, ...]
    needs: tuple[Need, ...] = ()
    tool: str = ""
    """A program that runs the interpreter."""
    is_timed: bool = False
    """It measures: nothing may run beside it."""

    def obstacle(self, facts: Facts) -> str | None:
        if facts.no_gpu:
            return facts.no_gpu
        return next((reason for need in self.needs if (reason := need(facts)) is not None), None)

    def arguments(self, facts: Facts, out: str) -> list[str]:
        paths = {
            "model": facts.model_path,
            "mla_model": facts.mla_model_path,
            "dsa_model": facts.dsa_model_path,
            "draft_model": facts.draft_model_path,
            "window_model": facts.window_model_path,
            "state_model": facts.state_model_path,
            "mtp_model": facts.mtp_model_path,
            "apart": ",".join(map(str, facts.apart[0])) if facts.apart else "",
        }
        return [part.format(out=out, **paths) for part in self.command]


MODELS: dict[str, Need] = {
    "{model}": model,
    "{mla_model}": mla_model,
    "{dsa_model}": dsa_model,
    "{window_model}": window_model,
    "{state_model}": state_model,
    "{mtp_model}": mtp_model,
}


def _served(
    name: str, further: str, *needs: Need, cases: str = "pools", path: str = "{model}", check: str = ""
) -> Step:
    command = ["test/gpu/server_check.py", "--model-path", path, "--cases", cases, "--log", f"{{out}}/{name}"]
    command += ["--conversations", "4", *check.split(), "--", *further.split()]
    wanted = (MODELS[path], server, *needs)
    return Step(f"server-{name}", tuple(command), wanted)


def _loaded(name: str, further: str, *needs: Need, path: str = "{model}", check: str = "") -> Step:
    """Many conversations at once: a forward is in flight whenever a page is fetched, evicted or waited for."""
    command = ["test/gpu/load_check.py", "--model-path", path, "--log", f"{{out}}/{name}"]
    command += [*check.split(), "--", *further.split()]
    return Step(f"server-{name}", tuple(command), (MODELS[path], server, *needs), is_timed=True)


FEW = "--cuda-graph-max-bs-decode 32 --cuda-graph-max-bs-prefill 2048"
"""Two ranks capture, twice a step: not every size there is."""
GRAPHS = f"--cuda-graph-backend-decode full --cuda-graph-backend-prefill breakable {FEW}"
WHOLE_GRAPHS = f"--cuda-graph-backend-decode full --cuda-graph-backend-prefill full {FEW}"
"""A prefill in one graph waits for its last layer alone."""
INDEXED = "--attention-backend dsa --page-size 64 --dtype bfloat16"
"""A model with an indexer. Prompts must be longer than its top-k, or its keys do not matter."""

TOGETHER = "--tp 2 --dp 2 --enable-dp-attention"
"""Ranks that step together: what one waits for, all wait for."""
FULL = "--max-total-tokens 16384"
"""Sixteen conversations do not find room in it: pages are evicted, and requests retracted, while others read them."""

CHAIN = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
ITSELF = f"--speculative-algorithm STANDALONE --speculative-draft-model-path {{model}} {CHAIN}"
"""The model drafts for itself, so that many drafts are accepted as long as their rows are there."""
EAGLE = f"--speculative-algorithm EAGLE --speculative-draft-model-path {{draft_model}} {CHAIN}"
NEXT_LAYER = f"--speculative-algorithm EAGLE {CHAIN}"
"""Multi-token prediction: the model brings the layer that drafts."""

KERNEL_TESTS = (
    "-m",
    "pytest",
    "test/gpu/test_kernel.py",
    "-q",
    "-p",
    "no:cacheprovider",
    "-k",
    "fp8 or odd or aligned",
)


def on_a_device(facts: Facts) -> str | None:
    return "the stand-in opens pools of SGLang's only" if facts.gpu == STAND_IN_NAME else None


def _tests(name: str, file: str, *needs: Need, chosen: str = "") -> Step:
    command = ("-m", "pytest", f"test/gpu/{file}", "-q", "-p", "no:cacheprovider", "-k", chosen)
    return Step(name, command, (module("pytest"), module("hypothesis"), *needs))


FIRST = ("device", "copies", "exchange", "server-plain", "server-concurrent")
"""What tells within ten minutes whether the rest is worth its time: driver calls, a copy, two processes, two ranks, and
sixteen streams with sharing and without."""

STEPS = (
    _tests("device", "test_driver.py"),
    _tests("copies", "test_kernel.py"),
    _tests("exchange", "test_exchange.py", on_a_device, chosen="one_gpu"),
    _served("plain", ""),
    _loaded("concurrent", GRAPHS),
    _tests("exchange-two-gpus", "test_exchange.py", on_a_device, two_gpus, peer_access, chosen="two_gpus"),
    _tests("reads", "test_reads.py", on_a_device),
    Step("streams", ("test/gpu/streams.py",), is_timed=True),
    Step("bench", ("test/gpu/bench_check.py",), is_timed=True),
    Step("figures", ("test/gpu/figures.py", "--log", "{out}/figures"), (server,), is_timed=True),
    _served("graphs", GRAPHS),
    _served("store", "", cases="store"),
    _served("full-pool", "--max-total-tokens 8192"),
    _served("full-pool-graphs", f"--max-total-tokens 8192 {GRAPHS}"),
    _loaded("concurrent-full-pool", f"{FULL} {GRAPHS}"),
    _loaded("concurrent-no-arena", f"--banyan-host-gb 0 {GRAPHS}"),
    _served("arena", "--banyan-host-gb 4"),
    _served("staged", "--banyan-host-gb 4", check="--staged"),
    _served("arena-small-pieces", "--banyan-host-gb 4", check="--small-pieces"),
    _served("staged-small-pieces", "--banyan-host-gb 4", check="--staged --small-pieces"),
    _served("chunked", "--chunked-prefill-size 512"),
    _served("chunked-graphs", f"--chunked-prefill-size 512 {GRAPHS}"),
    _served("fp8-kv", "--kv-cache-dtype fp8_e4m3"),
    _served("fp8-kv-graphs", f"--kv-cache-dtype fp8_e4m3 {GRAPHS}"),
    _served("flashinfer", "--attention-backend flashinfer", module("flashinfer")),
    _served("flashinfer-graphs", f"--attention-backend flashinfer {GRAPHS}", module("flashinfer")),
    _served("fa3", "--attention-backend fa3", *FA3),
    _served("fa3-graphs", f"--attention-backend fa3 {GRAPHS}", *FA3),
    _served("fa3-fp8-kv", f"--attention-backend fa3 --kv-cache-dtype fp8_e4m3 {GRAPHS}", *FA3),
    _served("mla", "", path="{mla_model}"),
    _served("mla-graphs", GRAPHS, path="{mla_model}"),
    _served("mla-store", "", path="{mla_model}", cases="store"),
    _served("mla-flashinfer", f"--attention-backend flashinfer {GRAPHS}", module("flashinfer"), path="{mla_model}"),
    _served("mla-fa3", f"--attention-backend fa3 {GRAPHS}", *FA3, path="{mla_model}"),
    _served("dsa", INDEXED, path="{dsa_model}"),
    _served("dsa-store", INDEXED, path="{dsa_model}", cases="store"),
    _served("dsa-damaged", INDEXED, path="{dsa_model}", check="--damaged without_index_keys"),
    _served("windows", "", path="{window_model}"),
    _served("windows-graphs", GRAPHS, path="{window_model}"),
    _served(
        "windows-whole-graphs",
        f"--attention-backend fa3 {WHOLE_GRAPHS}",
        *FA3,
        path="{window_model}",
    ),
    _served("windows-chunked", "--chunked-prefill-size 512", path="{window_model}"),
    _served("windows-full-pool", "--max-total-tokens 8192", path="{window_model}"),
    _served("windows-arena", "--banyan-host-gb 4", path="{window_model}"),
    _served("windows-store", "", path="{window_model}", cases="store"),
    _served("windows-damaged", "", path="{window_model}", check="--damaged mixed_windows"),
    _served("states", "", path="{state_model}"),
    _served("states-graphs", GRAPHS, path="{state_model}"),
    _served("states-chunked", "--chunked-prefill-size 512", path="{state_model}"),
    _served("states-few-slots", "--max-mamba-cache-size 24", path="{state_model}"),
    _served("states-arena", "--banyan-host-gb 4", path="{state_model}"),
    _served("states-store", "", path="{state_model}", cases="store"),
    _served("drafts", ITSELF),
    _served("drafts-graphs", f"{ITSELF} {GRAPHS}"),
    _served("drafts-store", ITSELF, cases="store"),
    _served("drafts-damaged", ITSELF, check="--damaged without_draft_rows"),
    _served("eagle", EAGLE, draft_model),
    _served("two-gpus", GRAPHS, two_gpus, peer_access, check="--all-gpus"),
    _served(
        "two-gpus-fa3",
        f"--attention-backend fa3 {GRAPHS}",
        *FA3,
        two_gpus,
        peer_access,
        check="--all-gpus",
    ),
    _served("two-gpus-mla", GRAPHS, two_gpus, peer_access, path="{mla_model}", check="--all-gpus"),
    _served("two-gpus-full-pool", f"--max-total-tokens 8192 {GRAPHS}", two_gpus, peer_access, check="--all-gpus"),
    _loaded("two-gpus-concurrent", GRAPHS, two_gpus, peer_access, check="--all-gpus"),
    _served("two-gpus-attn-dp", f"{TOGETHER} {GRAPHS}", two_gpus, peer_access, check="--all-gpus"),
    _loaded("two-gpus-attn-dp-concurrent", f"{TOGETHER} {GRAPHS}", two_gpus, peer_access, check="--all-gpus"),
    _loaded("two-gpus-attn-dp-full-pool", f"{TOGETHER} {FULL} {GRAPHS}", two_gpus, peer_access, check="--all-gpus"),
    _loaded(
        "two-gpus-attn-dp-mla",
        f"{TOGETHER} {FULL} {GRAPHS}",
        two_gpus,
        peer_access,
        path="{mla_model}",
        check="--all-gpus",
    ),
    _served(
        "two-gpus-attn-dp-mtp",
        f"{TOGETHER} {NEXT_LAYER} {GRAPHS}",
        two_gpus,
        peer_access,
        path="{mtp_model}",
        check="--all-gpus",
    ),
    _served(
        "two-gpus-attn-dp-mtp-damaged",
        f"{TOGETHER} {NEXT_LAYER} {GRAPHS}",
        two_gpus,
        peer_access,
        path="{mtp_model}",
        check="--all-gpus --damaged without_draft_rows",
    ),
    _loaded(
        "two-gpus-attn-dp-mtp-concurrent",
        f"{TOGETHER} {NEXT_LAYER} {FULL} {GRAPHS}",
        two_gpus,
        peer_access,
        path="{mtp_model}",
        check="--all-gpus",
    ),
    _served("four-gpus-tp", f"--tp 2 {GRAPHS}", four_gpus, peer_access_by_shard, check="--all-gpus"),
    _loaded("four-gpus-tp-concurrent", f"--tp 2 {GRAPHS}", four_gpus, peer_access_by_shard, check="--all-gpus"),
    _served("two-gpus-staged", "--banyan-host-gb 4", no_peer_access, check="--staged --gpus {apart}"),
    Step("memcheck", KERNEL_TESTS, (tool("compute-sanitizer"),), tool="memcheck"),
    Step("racecheck", KERNEL_TESTS, (tool("compute-sanitizer"),), tool="racecheck"),
)


NAME_WIDTH = max(len(step.name) for step in STEPS)


def in_turns(steps: Sequence[Step], num_jobs: int) -> list[tuple[list[Step], int]]:
    """Steps that run one after the other, or so many at once, and then those that measure, alone."""
    if num_jobs == 1:
        return [(list(steps), 1)]
    return [([step for step in steps if not step.is_timed], num_jobs), ([s for s in steps if s.is_timed], 1)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of a step. ``key`` is the ``Facts.key`` that it holds for."""

    outcome: str
    detail: str
    key: str
    seconds: float = 0.0


@dataclass(slots=True)
class Ledger:
    """What earlier runs have found, by step."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def to_do(self, facts: Facts, chosen: Sequence[str]) -> list[Step]:
        """The steps to run now, in order; what is not possible here is noted. ``chosen`` by name: run them again.

        Raises:
            ValueError: when a name is no step's.
        """
        unknown = set(chosen).difference(step.name for step in STEPS)
        if unknown:
            raise ValueError(f"no such step: {', '.join(sorted(unknown))}")
        left = []
        for step in STEPS:
            if chosen and step.name not in chosen:
                continue
            obstacle = step.obstacle(facts)
            if obstacle is not None:
                self.outcomes[step.name] = Outcome(NOT_POSSIBLE, obstacle, facts.key)
            elif chosen or not self.is_proved(step, facts):
                left.append(step)
        return left

    def is_proved(self, step: Step, facts: Facts) -> bool:
        known = self.outcomes.get(step.name)
        return known is not None and known.outcome == PROVED and known.key == facts.key

    def note(self, step: Step, facts: Facts, *, status: int, seconds: float, said: str = "") -> None:
        """``status``: how its process ended; negative by a signal, that is too late. ``said``: what it answered."""
        if status == 0:
            outcome = Outcome(PROVED, said, facts.key, seconds)
        else:
            reason = f"not done within {LIMIT_S} s" if status < 0 else f"status {status}"
            outcome = Outcome(FAILED, f"{reason}; {said}" if said else reason, facts.key, seconds)
        self.outcomes[step.name] = outcome

    def has_failed(self, facts: Facts) -> bool:
        return self.num(facts, FAILED) > 0

    def num(self, facts: Facts, outcome: str) -> int:
        """How many steps have come out so, here and at this commit."""
        return sum((known.outcome, known.key) == (outcome, facts.key) for known in self.outcomes.values())

    def line(self, step: Step, facts: Facts) -> str:
        """How a step has come out."""
        known = self.outcomes.get(step.name)
        if known is None:
            return f"{step.name:{NAME_WIDTH}} not run yet"
        took = f" ({known.seconds:.0f} s)" if known.seconds else ""
        stale = "" if known.key == facts.key else f" [of {known.key}]"
        return f"{step.name:{NAME_WIDTH}} {known.outcome}{took}{': ' if known.detail else ''}{known.detail}{stale}"

    def summary(self, facts: Facts) -> list[str]:
        """A line for each step, and one that counts them."""
        lines = []
        for step in STEPS:
            lines.append(self.line(step, facts))
        counts = {outcome: self.num(facts, outcome) for outcome in (PROVED, FAILED, NOT_POSSIBLE)}
        counts["not run yet"] = len(STEPS) - sum(counts.values())
        told = ", ".join(f"{num} {outcome}" for outcome, num in counts.items())
        lines.append(f"{len(STEPS)} steps at {facts.key}: {told}")
        return lines


def first_verdict(ledger: Ledger, facts: Facts) -> str:
    """Whether the steps that come first were proved."""
    counts = {outcome: 0 for outcome in (PROVED, FAILED, NOT_POSSIBLE)}
    for name in FIRST:
        known = ledger.outcomes.get(name)
        if known is not None and known.key == facts.key:
            counts[known.outcome] += 1
    told = ", ".join(f"{num} {outcome}" for outcome, num in counts.items() if num)
    return f"{'good' if counts[PROVED] == len(FIRST) else 'not good'} ({told} of {len(FIRST)})"


VERDICT = "verdict: "


def said_by(printed: str) -> str:
    """The answer in what a step has printed: its last line that is one."""
    lines = [line for line in printed.splitlines() if line.startswith(VERDICT)]
    return lines[-1].removeprefix(VERDICT) if lines else ""


def plan(facts: Facts) -> list[str]:
    """What each step runs, and why not where it is not possible."""
    told = []
    for step in STEPS:
        obstacle = step.obstacle(facts)
        told.append(f"{step.name:{NAME_WIDTH}} {f'{NOT_POSSIBLE}: {obstacle}' if obstacle else ' '.join(step.command)}")
    return told


def ledger_of(saved: Mapping[str, Mapping[str, object]]) -> Ledger:
    """Inverse of ``dataclasses.asdict`` over the outcomes."""
    return Ledger({name: Outcome(**fields) for name, fields in saved.items()})  # type: ignore[arg-type]
