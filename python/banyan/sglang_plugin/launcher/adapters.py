# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of ``--lora-paths``, told by what they are instead of by where they lie.

SGLang makes an adapter's id of its name and path, and page keys begin with that id. What outlives the server would then
be found again where another adapter lies at the same path. With an id of the content the keys say what was computed.
Keys begin with a client's ``extra_key`` as well, so one that could be taken for an adapter is refused.
Adapters that are loaded later get an id of their own each time; their pages end with the server.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from typing import Any

import msgspec
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.arg_groups.overrides import declare_resolution

from banyan.layout.checkpoint import adapter_id, may_name_adapter
from banyan.sglang_plugin import model_files, runtime

logger = logging.getLogger("banyan")


def after_check_server_args(result: None, server_args: Any) -> None:
    """Give the adapters of checked arguments ids of their content, for this process and those that it starts."""
    carried = runtime.bookkeeping(server_args)
    if carried is None or not carried["config"].shares:
        return
    adapters = resolved_view(server_args).lora_paths
    if not adapters:
        return
    # Before their content is looked at: they are loaded later.
    carried["noted"] += [model_files.note(adapter.lora_path) for adapter in adapters]
    wanted = resolved_view(server_args).lora_target_modules
    modules = wanted or {module for adapter in adapters for module in _modules(adapter)}
    declare_resolution(server_args, "banyan", lora_paths=[_told(adapter, modules) for adapter in adapters])


def named_by(extra_keys: Any, manager: Any) -> bool:
    """Whether one of a client's names of its prefixes, one or a list, could be taken for an adapter."""
    if not extra_keys:
        return False
    registry = getattr(manager, "lora_registry", None)
    ids = [one.lora_id for one in registry.get_all_adapters().values()] if registry is not None else []
    asked = [extra_keys] if isinstance(extra_keys, str) else extra_keys
    return any(isinstance(extra_key, str) and may_name_adapter(extra_key, ids) for extra_key in asked)


def _modules(adapter: Any) -> set[str]:
    """What it says to be for. What else is in its files SGLang applies where another adapter is for it."""
    try:
        said = json.loads((model_files.folder_of(adapter.lora_path) / "adapter_config.json").read_bytes())
        named = said["target_modules"]
        return {named} if isinstance(named, str) else set(map(str, named))
    except (OSError, ValueError, KeyError, TypeError):
        # SGLang ends when it loads it.
        return set()


def _told(adapter: Any, modules: Collection[str]) -> Any:
    try:
        folder = model_files.folder_of(adapter.lora_path)
        return msgspec.structs.replace(adapter, lora_id=adapter_id(adapter.lora_name, folder, modules))
    except (OSError, ValueError) as error:
        logger.warning(
            "banyan: pages of the adapter %s are shared while this server lives, and neither kept nor stored: %s",
            adapter.lora_name,
            error,
        )
        return adapter
