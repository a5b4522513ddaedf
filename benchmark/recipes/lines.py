# SPDX-License-Identifier: Apache-2.0
"""Launch lines: those of a folder of data, or a short list of our own, and what was said of one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.modes import models

RENAMED = {
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--nsa-prefill-backend": "--dsa-prefill-backend",
    "--nsa-decode-backend": "--dsa-decode-backend",
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
    "--enable-nsa-prefill-context-parallel": "--enable-prefill-cp",
    "--enable-dsa-prefill-context-parallel": "--enable-prefill-cp",
    "--dsa-prefill-cp-mode": "--cp-strategy",
}
"""Flags of other releases, by what the pinned one calls them."""

CP_MODES = {"round-robin-split": "interleave", "in-seq-split": "zigzag"}
"""Values of ``--dsa-prefill-cp-mode``, by those of ``--cp-strategy``. The pinned release has no default for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One launch line. ``model`` is a folder with a configuration; no weights are read.

    Attributes:
        gpu: by the name that it is sold under.
        is_in_step: whether several ranks of one server are meant, with attention data parallelism.
        variables: of the environment.
    """

    name: str
    family: str
    model: Path
    arguments: tuple[str, ...]
    gpu: str = "H100"
    is_in_step: bool = False
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def words(self) -> str:
        """To copy, but for the model."""
        return " ".join(("--enable-banyan", *self.arguments))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the launcher would do. ``reasons`` are Banyan's lines, or SGLang's own error."""

    is_shared: bool
    has_crashed: bool = False
    reasons: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """What each reason is about, in a word: the flag that it names first, or the model."""
        found = (re.search(r"(?<![\w/])--[a-z][a-z0-9-]+", reason) for reason in self.reasons)
        return tuple("the model" if flag is None else flag.group() for flag in found)


def of_folder(folder: Path) -> list[Line]:
    """The lines of ``recipes.jsonl``, with the configurations beside it in ``models``, for GPUs that Banyan is for.

    Raises:
        OSError: where there is none.
    """
    stubs = {path.name: path for path in sorted((folder / "models").iterdir())}
    rows = [json.loads(row) for row in (folder / "recipes.jsonl").read_text().splitlines()]
    return [
        Line(
            name=row["id"],
            family=row["family"],
            model=stubs[row["stub"]],
            arguments=_as_now(row["args"].split(), stubs),
            gpu=row["hardware"],
            is_in_step=row["rank_kind"] != "one rank",
            variables=tuple((name, value) for name, _, value in (one.partition("=") for one in row["env"].split())),
        )
        for row in rows
        if row["hardware"].startswith(("H", "B", "GB"))
    ]


def _as_now(words: Sequence[str], stubs: dict[str, Path]) -> tuple[str, ...]:
    """As the pinned release spells them; ``{name}`` is the folder of that configuration."""
    named = [re.sub(r"\{([\w.-]+)\}", lambda found: str(stubs[found[1]]), word) for word in words]
    kept = [CP_MODES.get(word, RENAMED.get(word, word)) for word in named]
    if "--enable-prefill-cp" in kept and "--cp-strategy" not in kept:
        kept += ("--cp-strategy", "interleave")
    return tuple(kept)


def our_own() -> list[Line]:
    """Without data: one line for each kind of what a model keeps, on tiny models."""
    in_step = ("--tp", "2", "--dp", "2", "--enable-dp-attention")
    chain = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
    eagle = ("--speculative-algorithm", "EAGLE", *chain)
    asked: list[tuple[str, models.Shape, tuple[str, ...], bool]] = [
        ("keys and values", models.LLAMA, ("--dp", "2"), False),
        ("mixture of experts", models.MOE, in_step, True),
        ("latents", models.MLA, ("--dp", "2"), False),
        ("latents", models.MLA_MTP, (*in_step, *eagle), True),
        ("sliding windows", models.WINDOW, ("--dp", "2"), False),
        ("sliding windows", models.WINDOW, in_step, True),
        ("states", models.STATE, ("--dp", "2"), False),
        ("keys and values", models.LLAMA, ("--dp", "2", "--pp-size", "2"), False),
    ]
    return [
        Line(name=f"own {number}", family=family, model=models.ensure(shape), arguments=flags, is_in_step=together)
        for number, (family, shape, flags, together) in enumerate(asked, start=1)
    ]
