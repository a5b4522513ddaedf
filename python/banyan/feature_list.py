# SPDX-License-Identifier: Apache-2.0
"""The list of features, and what becomes of a server where one is off: pure.

The feature of a patch is its folder. ``core`` is what sharing itself needs: without one of its patches Banyan is off.
Any other feature is off by itself, where one of its patches does not fit or its folder is not installed, and all else
works. A row of ``FEATURES`` says what stands in its place, and which flag or model cannot do without it; such a server
is refused. This is the one place that names features; what they bring is asked for with ``installed``.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from banyan.config import DEFAULT_TOLD_SHARE, SGLANG_POLICY, Config
from banyan.feature import Asked, Feature, Parts, StoreScheme
from banyan.patches import WRITTEN_AGAINST, Misfit
from banyan.refusals.models import ModelFacts
from banyan.refusals.start import misfit_refusal

CORE = "core"
FILE_SCHEMES = ("", "file", "3fs")
"""Stores that the core has."""


def _needed(name: str, needed_by: Callable[[Asked], str], *, has_folder: bool = False) -> Feature:
    """One for servers of a kind, which cannot do without."""

    def needed_to_share(asked: Asked) -> str:
        return needed_by(asked) if asked.config.shares else ""

    return Feature(
        name=name,
        instead="servers and models that need it are refused",
        is_used=lambda asked: bool(needed_to_share(asked)),
        needed_by=needed_to_share,
        has_folder=has_folder,
    )


def _by_model(has: Callable[[ModelFacts], bool], what: str) -> Callable[[Asked], str]:
    def needed_by(asked: Asked) -> str:
        model = asked.model
        return f"{model.architecture} keeps {what}" if model is not None and has(model) else ""

    return needed_by


def _takes_media(asked: Asked) -> str:
    model = asked.model
    return f"{model.architecture} takes images, video or sound" if model is not None and model.takes_media else ""


def _in_several_processes(asked: Asked) -> str:
    """Where one process would not know that the core is off in another: at their start the ranks of the other nodes
    wait for those of this one, and HTTP workers serve without the path that probes ask for."""
    if asked.config.shares and asked.layout is not None and asked.layout.num_nodes > 1:
        return "--nnodes"
    has_workers = asked.args is not None and asked.args.tokenizer_worker_num > 1
    return "--tokenizer-worker-num" if has_workers else ""


def _scheme(config: Config) -> str:
    """Of the store that is wanted."""
    return config.store[0].partition("://")[0] if config.store and "://" in config.store[0] else ""


FEATURES: tuple[Feature, ...] = (
    Feature(
        name=CORE,
        instead="Banyan is off, and SGLang serves as without it",
        needed_by=_in_several_processes,
    ),
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
    _needed("windows", _by_model(lambda model: model.has_window, "a sliding window"), has_folder=True),
    _needed("states", _by_model(lambda model: model.has_states, "states"), has_folder=True),
    _needed("index_keys", _by_model(lambda model: model.has_index_keys, "index keys")),
    _needed("images", _takes_media),
    _needed("drafts", lambda asked: f"--speculative-algorithm {asked.algorithm}" if asked.algorithm else ""),
    _needed("adapters", lambda asked: "--lora-paths" if asked.has_adapters else ""),
    _needed(
        "pairs",
        lambda asked: (
            "" if asked.disaggregation_mode == "null" else f"--disaggregation-mode {asked.disaggregation_mode}"
        ),
        has_folder=True,
    ),
    Feature(
        name="resharding",
        instead="what servers with another --tp have stored is not found",
        is_used=lambda asked: bool(asked.config.shares and asked.config.store),
        has_folder=True,
    ),
    _needed(
        "nodes",
        lambda asked: "--banyan-listen" if asked.config.listen else "--banyan-peers" if asked.config.peers else "",
        has_folder=True,
    ),
    _needed("ray_actors", lambda asked: "--use-ray" if getattr(asked.args, "use_ray", False) else "", has_folder=True),
    _needed(
        "stores",
        lambda asked: "" if (scheme := _scheme(asked.config)) in FILE_SCHEMES else f"--banyan-store {scheme}://",
        has_folder=True,
    ),
    Feature(
        name="told",
        instead="what clients say of prefixes that are to be kept is passed over",
        needed_by=lambda asked: (
            "--banyan-told-share" if asked.config.shares and asked.config.told_share != DEFAULT_TOLD_SHARE else ""
        ),
        has_folder=True,
    ),
    _needed(
        "tenant_share",
        lambda asked: "--banyan-tenant-share" if asked.config.tenant_share is not None else "",
        has_folder=True,
    ),
    Feature(
        name="answers",
        instead="answers count tokens of peers and stores as SGLang's host, and prompts are not counted",
        needed_by=lambda asked: "" if asked.config.answer_details else "--banyan-no-answer-details",
    ),
    Feature(name="guards", instead="SGLang does there as without Banyan", is_severable=True),
    Feature(
        name="observe",
        instead="what it tells is missing, and /health_ranks too: the chart's probes fail, Ray's ask /health",
        is_severable=True,
    ),
)
_BY_NAME = {feature.name: feature for feature in FEATURES}


@functools.cache
def installed() -> Mapping[str, Parts]:
    """What the folders bring that are installed, by feature, in the order of the list."""
    return {
        feature.name: importlib.import_module(feature.folder).PARTS
        for feature in FEATURES
        if feature.has_folder and feature.is_installed
    }


def store_schemes() -> Mapping[str, StoreScheme]:
    """Those that features bring."""
    return {scheme: one for parts in installed().values() for scheme, one in parts.stores.items()}


def part(place: str) -> Any:
    """What lies at a place of ``Parts``."""
    return pkgutil.resolve_name(place)


def lines(asked: Asked) -> list[str]:
    """One line for each reason why this server cannot have what it was asked for of a feature."""
    return [line for parts in installed().values() for line in parts.refusals(asked)]


@dataclass(frozen=True, slots=True)
class Off:
    """A feature that is off; of a severable one, ``name`` is the patch that is."""

    name: str
    feature: Feature
    reasons: tuple[str, ...]
    package: str = "sglang"
    """The one that is not as it was."""

    @property
    def way_out(self) -> str:
        return f"install {self.package}=={WRITTEN_AGAINST[self.package]} as it was published"

    @property
    def line(self) -> str:
        """For the log."""
        return f"{self.name} is off ({self.feature.instead}): {'; '.join(self.reasons)}"


def absent() -> list[Off]:
    """The features whose folders are not installed."""
    return [
        Off(feature.name, feature, (f"{feature.folder} is not installed",))
        for feature in FEATURES
        if not feature.is_installed
    ]


def switched_off(misfits: Iterable[Misfit]) -> list[Off]:
    """What patches that do not fit switch off, in the order of ``FEATURES``."""
    of_each: dict[tuple[str, str], list[Misfit]] = {}
    for misfit in misfits:
        feature = _BY_NAME[misfit.patch.feature]
        name = misfit.patch.name if feature.is_severable else feature.name
        of_each.setdefault((feature.name, name), []).append(misfit)
    order = list(_BY_NAME)
    found = sorted(of_each.items(), key=lambda item: order.index(item[0][0]))
    return [Off(name, _BY_NAME[feature], tuple(map(str, own)), own[0].source.package) for (feature, name), own in found]


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
