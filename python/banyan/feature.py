# SPDX-License-Identifier: Apache-2.0
"""What a feature is: a folder that can be taken away. Pure.

``Feature`` is what the core knows of one: a row of ``banyan.feature_list``, and what is done where it is off.
``Parts`` is what the folder ``banyan.features.NAME`` brings, and the core asks every folder for the same. Inside the
folder the rooms ``launcher``, ``dispatcher``, ``rank`` and ``pools`` run in the processes of the same name, and they
alone import SGLang. No feature imports another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from importlib.util import find_spec
from typing import Any

from banyan.config import Config
from banyan.layout import Layout
from banyan.refusals.models import ModelFacts

PACKAGE = "banyan.features"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a server was asked for, as far as a feature depends on it.

    ``model``: once SGLang has looked at it. ``args``: SGLang's, as they were given or as it has resolved them.
    """

    config: Config
    device: str = "cpu"
    algorithm: str | None = None
    has_adapters: bool = False
    disaggregation_mode: str = "null"
    steps_together: bool = False
    model: ModelFacts | None = None
    layout: Layout | None = None
    args: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A row of the list; its patches lie in the folder of ``banyan/patches`` that has its name.

    Attributes:
        instead: what happens where it is off.
        is_used: whether a server has anything of it.
        needed_by: the flag, or what of the model, cannot do without; "" where nothing is.
        without: the configuration of a server that does without.
        is_severable: each of its patches can be off by itself.
        has_folder: its code lies in ``banyan.features``. Where that is not installed, it is off.
    """

    name: str
    instead: str
    is_used: Callable[[Asked], bool] = lambda asked: True
    needed_by: Callable[[Asked], str] = lambda asked: ""
    without: Callable[[Config], Config] = lambda config: config
    is_severable: bool = False
    has_folder: bool = False

    @property
    def folder(self) -> str:
        """Its package."""
        return f"{PACKAGE}.{self.name}"

    @property
    def is_installed(self) -> bool:
        # A folder that has only compiled files left is a package without code: it has no origin.
        return not self.has_folder or ((spec := find_spec(self.folder)) is not None and spec.origin is not None)


@dataclass(frozen=True, slots=True)
class StoreScheme:
    """A kind of URL for ``--banyan-store``.

    Attributes:
        backend: "module:name" of its ``banyan.store.backends.Backend``.
        is_hosted: behind it a host is named, not folders.
        must_be_asked: what it holds is known only when it is asked.
        near: beginnings of URLs that are meant for it and are not its own; ``near_line`` says so.
    """

    backend: str
    _: KW_ONLY
    is_hosted: bool = False
    must_be_asked: bool = False
    near: tuple[str, ...] = ()
    near_line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a feature's folder brings, as ``PARTS`` of its package. Places are "module:name", imported when wanted.

    Attributes:
        page: its page of documentation, in ``docs/``.
        flags: those fields of ``Config`` that are of it alone.
        refusals: one line for each reason why a server that was asked for like this cannot have it.
        launched: what it sets in SGLang's arguments before the start, in the main process.
        carried: what it leaves there for the other processes, by a name of its own.
        stores: schemes of ``--banyan-store``.
        rank: called with ``sglang_plugin.rank.points.Points`` in each rank before it is put together.
    """

    page: str
    flags: tuple[str, ...] = ()
    refusals: Callable[[Asked], list[str]] = lambda asked: []
    launched: Callable[[Asked], None] = lambda asked: None
    carried: Callable[[Asked], Mapping[str, Any]] = lambda asked: {}
    stores: Mapping[str, StoreScheme] = field(default_factory=dict)
    rank: str = ""
