# SPDX-License-Identifier: Apache-2.0
"""The steps of ``make gpu-check``, what each needs, and what is known of each: pure.

Every step fits into ``LIMIT_S``. A step that was proved for this commit on this GPU is not done again; one that failed
is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

LIMIT_S = 480

PROVED, FAILED, NOT_POSSIBLE = "proved", "failed", "not possible here"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the machine has. ``modules`` are those of Python that can be imported, ``tools`` programs that are there."""

    commit: str
    gpu: str
    num_gpus: int
    has_peer_access: bool
    modules: frozenset[str] = frozenset()
    tools: frozenset[str] = frozenset()
    missing_to_compile: tuple[str, ...] = ()
    model_path: str = ""
    mla_model_path: str = ""
    dsa_model_path: str = ""
    draft_model_path: str = ""
    window_model_path: str = ""

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


def draft_model(facts: Facts) -> str | None:
    return None if facts.draft_model_path else "DRAFT_MODEL_PATH is not set"


def two_gpus(facts: Facts) -> str | None:
    return None if facts.num_gpus > 1 else "one GPU"


def peer_access(facts: Facts) -> str | None:
    return None if facts.has_peer_access else "the GPUs cannot read each other"


def no_peer_access(facts: Facts) -> str | None:
    return None if facts.num_gpus > 1 and not facts.has_peer_access else "there are no GPUs that cannot read each other"


@dataclass(frozen=True, slots=True)
class Step:
    """``command`` without the interpreter; ``arguments`` fills in ``{out}`` and the names of ``MODELS``."""

    name: str
    command: tuple[str, ...]
    needs: tuple[Need, ...] = ()
    tool: str = ""
    """A program that runs the interpreter."""

    def obstacle(self, facts: Facts) -> str | None:
        return next((reason for need in self.needs if (reason := need(facts)) is not None), None)

    def arguments(self, facts: Facts, out: str) -> list[str]:
        paths = {
            "model": facts.model_path,
            "mla_model": facts.mla_model_path,
            "dsa_model": facts.dsa_model_path,
            "draft_model": facts.draft_model_path,
            "window_model": facts.window_model_path,
        }
        return [part.format(out=out, **paths) for part in self.command]


MODELS: dict[str, Need] = {
    "{model}": model,
    "{mla_model}": mla_model,
    "{dsa_model}": dsa_model,
    "{window_model}": window_model,
}


def _served(
    name: str, further: str, *needs: Need, cases: str = "pools", path: str = "{model}", check: str = ""
) -> Step:
    command = ["test/gpu/server_check.py", "--model-path", path, "--cases", cases, "--log", f"{{out}}/{name}"]
    command += ["--conversations", "4", *check.split(), "--", *further.split()]
    wanted = (MODELS[path], server, *needs)
    return Step(f"server-{name}", tuple(command), wanted)


GRAPHS = "--cuda-graph-backend-decode full --cuda-graph-backend-prefill breakable"
WHOLE_GRAPHS = "--cuda-graph-backend-decode full --cuda-graph-backend-prefill full"
"""A prefill in one graph waits for its last layer alone."""
INDEXED = "--attention-backend dsa --page-size 64 --dtype bfloat16"
"""A model with an indexer. Prompts must be longer than its top-k, or its keys do not matter."""

CHAIN = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
ITSELF = f"--speculative-algorithm STANDALONE --speculative-draft-model-path {{model}} {CHAIN}"
"""The model drafts for itself, so that many drafts are accepted as long as their rows are there."""
EAGLE = f"--speculative-algorithm EAGLE --speculative-draft-model-path {{draft_model}} {CHAIN}"

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

STEPS = (
    Step(
        "tests", ("-m", "pytest", "test/gpu", "-q", "-p", "no:cacheprovider"), (module("pytest"), module("hypothesis"))
    ),
    _served("plain", ""),
    _served("graphs", GRAPHS),
    _served("store", "", cases="store"),
    _served("full-pool", "--max-total-tokens 8192"),
    _served("arena", "--banyan-host-gb 4"),
    _served("chunked", "--chunked-prefill-size 512"),
    _served("fp8-kv", "--kv-cache-dtype fp8_e4m3"),
    _served("flashinfer", f"--attention-backend flashinfer {GRAPHS}", module("flashinfer")),
    _served("fa3", f"--attention-backend fa3 {GRAPHS}", module("sgl_kernel.flash_attn")),
    _served("mla", "", path="{mla_model}"),
    _served("dsa", INDEXED, path="{dsa_model}"),
    _served("dsa-store", INDEXED, path="{dsa_model}", cases="store"),
    _served("dsa-damaged", INDEXED, path="{dsa_model}", check="--damaged without_index_keys"),
    _served("windows", "", path="{window_model}"),
    _served("windows-graphs", GRAPHS, path="{window_model}"),
    _served(
        "windows-whole-graphs",
        f"--attention-backend fa3 {WHOLE_GRAPHS}",
        module("sgl_kernel.flash_attn"),
        path="{window_model}",
    ),
    _served("windows-chunked", "--chunked-prefill-size 512", path="{window_model}"),
    _served("windows-full-pool", "--max-total-tokens 8192", path="{window_model}"),
    _served("windows-arena", "--banyan-host-gb 4", path="{window_model}"),
    _served("windows-store", "", path="{window_model}", cases="store"),
    _served("windows-damaged", "", path="{window_model}", check="--damaged mixed_windows"),
    _served("drafts", ITSELF),
    _served("drafts-graphs", f"{ITSELF} {GRAPHS}"),
    _served("drafts-store", ITSELF, cases="store"),
    _served("drafts-damaged", ITSELF, check="--damaged without_draft_rows"),
    _served("eagle", EAGLE, draft_model),
    _served("two-gpus", GRAPHS, two_gpus, peer_access, check="--all-gpus"),
    _served("two-gpus-staged", "--banyan-host-gb 4", no_peer_access, check="--all-gpus"),
    Step("bench", ("-m", "banyan.cli", "bench", "gpu", "--json")),
    Step("memcheck", KERNEL_TESTS, (tool("compute-sanitizer"),), tool="memcheck"),
    Step("racecheck", KERNEL_TESTS, (tool("compute-sanitizer"),), tool="racecheck"),
)


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

    def note(self, step: Step, facts: Facts, *, status: int, seconds: float) -> None:
        """``status``: how its process ended; negative by a signal, that is too late."""
        if status == 0:
            outcome = Outcome(PROVED, "", facts.key, seconds)
        else:
            reason = f"not done within {LIMIT_S} s" if status < 0 else f"status {status}"
            outcome = Outcome(FAILED, reason, facts.key, seconds)
        self.outcomes[step.name] = outcome

    def has_failed(self, facts: Facts) -> bool:
        return any(known.outcome == FAILED and known.key == facts.key for known in self.outcomes.values())

    def summary(self, facts: Facts) -> list[str]:
        """A line for each step."""
        lines = []
        for step in STEPS:
            known = self.outcomes.get(step.name)
            if known is None:
                lines.append(f"{step.name:22} not run yet")
                continue
            took = f" ({known.seconds:.0f} s)" if known.seconds else ""
            stale = "" if known.key == facts.key else f" [of {known.key}]"
            lines.append(f"{step.name:22} {known.outcome}{took}{': ' if known.detail else ''}{known.detail}{stale}")
        return lines


def ledger_of(saved: Mapping[str, Mapping[str, object]]) -> Ledger:
    """Inverse of ``dataclasses.asdict`` over the outcomes."""
    return Ledger({name: Outcome(**fields) for name, fields in saved.items()})  # type: ignore[arg-type]
