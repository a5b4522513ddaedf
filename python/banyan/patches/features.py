# SPDX-License-Identifier: Apache-2.0
"""What a feature is where one of its patches does not fit: pure.

The feature of a patch is its folder. ``core`` is what sharing itself needs: without one of its patches Banyan is off.
Any other feature is off by itself, and all else works. A row of ``FEATURES`` says what stands in its place, and which
flag or model cannot do without it; such a server is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from banyan.config import SGLANG_POLICY, Config
from banyan.patches import Misfit
from banyan.refusals.misfit import misfit_refusal
from banyan.refusals.models import ModelFacts

CORE = "core"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a server was asked for, as far as a feature depends on it. ``model``: once SGLang has looked at it."""

    config: Config
    algorithm: str | None = None
    has_adapters: bool = False
    disaggregation_mode: str = "null"
    steps_together: bool = False
    model: ModelFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A folder of patches.

    Attributes:
        instead: what happens where it is off.
        is_used: whether a server has anything of it.
        needed_by: the flag, or what of the model, cannot do without; "" where nothing is.
        without: the configuration of a server that does without.
        is_severable: each of its patches can be off by itself.
    """

    name: str
    instead: str
    is_used: Callable[[Asked], bool] = lambda asked: True
    needed_by: Callable[[Asked], str] = lambda asked: ""
    without: Callable[[Config], Config] = lambda config: config
    is_severable: bool = False


def _needed(name: str, needed_by: Callable[[Asked], str]) -> Feature:
    """One for servers of a kind, which cannot do without."""

    def needed_to_share(asked: Asked) -> str:
        return needed_by(asked) if asked.config.shares else ""

    return Feature(
        name=name,
        instead="servers and models that need it are refused",
        is_used=lambda asked: bool(needed_to_share(asked)),
        needed_by=needed_to_share,
    )


def _by_model(has: Callable[[ModelFacts], bool], what: str) -> Callable[[Asked], str]:
    def needed_by(asked: Asked) -> str:
        model = asked.model
        return f"{model.architecture} keeps {what}" if model is not None and has(model) else ""

    return needed_by


FEATURES: tuple[Feature, ...] = (
    Feature(name=CORE, instead="Banyan is off, and SGLang serves as without it"),
    Feature(
        name="placement",
        instead="SGLang's own method chooses ranks (--banyan-policy sglang)",
        is_used=lambda asked: asked.config.looks_up,
        without=lambda config: replace(config, policy=SGLANG_POLICY, prefix_hints=False),
    ),
    Feature(name="victims", instead="SGLang evicts by age, and does not know what peers hold"),
    Feature(
        name="planner",
        instead="no forward is measured: what is found is fetched",
        needed_by=lambda asked: "--enable-dp-attention" if asked.config.shares and asked.steps_together else "",
    ),
    _needed("windows", _by_model(lambda model: model.has_window, "a sliding window")),
    _needed("states", _by_model(lambda model: model.has_states, "states")),
    _needed("index_keys", _by_model(lambda model: model.has_index_keys, "index keys")),
    _needed("drafts", lambda asked: f"--speculative-algorithm {asked.algorithm}" if asked.algorithm else ""),
    _needed("adapters", lambda asked: "--lora-paths" if asked.has_adapters else ""),
    _needed(
        "pairs",
        lambda asked: (
            "" if asked.disaggregation_mode == "null" else f"--disaggregation-mode {asked.disaggregation_mode}"
        ),
    ),
    Feature(
        name="answers",
        instead="answers count tokens of peers and stores as SGLang's host, and prompts are not counted",
        needed_by=lambda asked: (
            "--banyan-no-answer-details" if asked.config.shares and not asked.config.answer_details else ""
        ),
    ),
    Feature(name="guards", instead="SGLang does there as without Banyan", is_severable=True),
    Feature(name="observe", instead="what it tells is missing", is_severable=True),
)
_BY_NAME = {feature.name: feature for feature in FEATURES}


@dataclass(frozen=True, slots=True)
class Off:
    """A feature that is off; of a severable one, ``name`` is the patch that is."""

    name: str
    feature: Feature
    reasons: tuple[str, ...]

    @property
    def line(self) -> str:
        """For the log."""
        return f"{self.name} is off ({self.feature.instead}): {'; '.join(self.reasons)}"


def switched_off(misfits: Iterable[Misfit]) -> list[Off]:
    """What patches that do not fit switch off, in the order of ``FEATURES``."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for misfit in misfits:
        feature = _BY_NAME[misfit.patch.feature]
        name = misfit.patch.name if feature.is_severable else feature.name
        reasons.setdefault((feature.name, name), []).append(str(misfit))
    order = list(_BY_NAME)
    found = sorted(reasons.items(), key=lambda item: order.index(item[0][0]))
    return [Off(name, _BY_NAME[feature], tuple(lines)) for (feature, name), lines in found]


def refusals(off: Mapping[str, Sequence[str]], asked: Asked) -> list[str]:
    """One line for each feature that is off, as ``off`` says why, and that this server cannot do without."""
    return [
        misfit_refusal(needed_by=needed_by, feature=feature.name, reasons=off[feature.name])
        for feature in FEATURES
        if feature.name in off and (needed_by := feature.needed_by(asked))
    ]


def needed(asked: Asked) -> list[str]:
    """The features that this server cannot do without."""
    return [feature.name for feature in FEATURES if feature.name == CORE or feature.needed_by(asked)]
