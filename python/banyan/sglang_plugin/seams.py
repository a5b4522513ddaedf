# SPDX-License-Identifier: Apache-2.0
"""Registers Banyan's patch queue with SGLang and proves that it took.

The main process compares fingerprints before it turns Banyan on, and the first object that Banyan builds in another
process calls ``verify``: without a hook of the core, or of a feature that this server needs, a process shares nothing;
without one of another feature, that feature is off in it.

Hooks of a feature that is off are not registered. In the main process they are registered before the flags are known,
and pass through.
"""

from __future__ import annotations

import logging

from banyan import patches
from banyan.feature_list import CORE, Off, absent, switched_off
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.hook_queue import Hooks

logger = logging.getLogger("banyan")

ABSENT = {off.name: off for off in absent()}
"""Features that are not installed."""

HOOKS = Hooks([patch for patch in patches.load_queue() if patch.feature not in ABSENT], is_on=runtime.is_on)


def register() -> None:
    """Register Banyan's hooks in this process."""
    if not runtime.is_main_process():
        runtime.heed_main()
    HOOKS.register()


def unfit() -> list[Off]:
    """What is off on this SGLang, for sources that are not those that Banyan was written against, or for hooks that the
    main process lacks; and what is not installed. Says where another plugin has changed such a source in this
    process."""
    for source in HOOKS.beside_others():
        logger.warning("banyan: %s: no fingerprint tells what it does there", source)
    return [*switched_off([*patches.changed(HOOKS.queue), *HOOKS.missing("main")]), *ABSENT.values()]


def off(process: str) -> list[str]:
    """What is off in this process, and what ``verify`` would switch off, of what it would have hooks of."""
    found = {*runtime.features_off(), *(one.name for one in switched_off(HOOKS.missing(process)))}
    here = {name for patch in HOOKS.queue if process in patch.processes for name in (patch.name, patch.feature)}
    return sorted(found & (here | ABSENT.keys()))


class NoHooks(RuntimeError):
    """SGLang has skipped hooks that nothing can do without."""


def verify(process: str) -> None:
    """Switch off, in this process, the features of which a hook is not in place.

    Raises:
        NoHooks: where this server cannot do without one.
    """
    off = switched_off(HOOKS.missing(process))
    if not off:
        return
    needed = {CORE, *runtime.needed()}
    for one in off:
        if one.feature.name in needed:
            raise NoHooks(one.line)
        runtime.switch_off(one.name)
        logger.warning("banyan: in this process %s", one.line)
