# SPDX-License-Identifier: Apache-2.0
"""What the cache can be told, and the form in which it goes from the main process to all ranks: pure.

A command names a prefix by its tokens, and whose it is by salt and extra key, as a request does.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

METHOD = "banyan.cache"
"""Names these commands among those that SGLang passes to all ranks."""

ACTION_VERSION = "1"
"""Of the actions in ``kv_hints``."""

DEFAULT_TTL_S = 300.0
MAX_TTL_S = 86_400.0
IDS = "i"
"""Of ``array``: ids of 31 bits."""
MAX_TEXT = 1024
"""Characters of a salt or an extra key. They are hashed; nobody keeps them."""


class Action(StrEnum):
    """``PIN``: keep until the time is over, or refuse. ``RETAIN``: keep what there is room for, until a pin needs it.
    ``PREFETCH``: bring it into the arena. ``DEMOTE``: let it leave the arena next. ``RELEASE``: keep it no longer.
    ``LIST``: say what is kept."""

    PIN = "pin"
    RETAIN = "retain"
    PREFETCH = "prefetch"
    DEMOTE = "demote"
    RELEASE = "release"
    LIST = "list"


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``session``: the name of the session at whose end the prefix is released, as a hash. ``name``: of what is told
    here, among all that HTTP workers tell. ``takes_back``: the name of what was just told and is released now.
    ``num_untold``: wishes that were passed over. The last three are no client's words."""

    action: Action
    input_ids: list[int] = []
    ttl_s: float = DEFAULT_TTL_S
    cache_salt: str | None = None
    extra_key: str | None = None
    session: str | None = None
    name: str = ""
    takes_back: str = ""
    num_untold: int = 0

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Command:
        """Read what somebody has said.

        Raises:
            ValueError: for what is no command, naming the field.
        """
        try:
            command = msgspec.convert(body, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        command.check()
        # As SGLang takes those of a request: an empty one is none.
        salt, extra_key = command.cache_salt or None, command.extra_key or None
        return msgspec.structs.replace(command, cache_salt=salt, extra_key=extra_key)

    def check(self) -> None:
        """
        Raises:
            ValueError: naming the field that says what nobody may say.
        """
        if not (math.isfinite(self.ttl_s) and 0 < self.ttl_s <= MAX_TTL_S):
            raise ValueError(f"ttl_s: seconds above 0, {MAX_TTL_S:g} at most")
        if self.action is not Action.LIST and not self.input_ids:
            raise ValueError("input_ids: a prompt without tokens")
        # A rank looks at a long prompt too, on its scheduler thread: two passes in C.
        if self.input_ids and not 0 <= min(self.input_ids) <= max(self.input_ids) < 1 << 31:
            raise ValueError("input_ids: no token ids")
        for field in ("cache_salt", "extra_key", "session"):
            if len(getattr(self, field) or "") > MAX_TEXT:
                raise ValueError(f"{field}: {MAX_TEXT} characters at most")

    def body(self) -> dict[str, Any]:
        """As SGLang passes it on: the tokens in one piece, for they go through several processes, schedulers too."""
        body: dict[str, Any] = msgspec.to_builtins(self)
        return {**body, "input_ids": array(IDS, self.input_ids).tobytes()}

    @classmethod
    def of_passed_on(cls, body: Any) -> Command:
        """What ``body`` has made; what somebody else has sent this way is read as what somebody says.

        Raises:
            ValueError: for what is no command.
        """
        ids = body.get("input_ids") if isinstance(body, dict) else None
        return cls.of({**body, "input_ids": array(IDS, ids).tolist()} if isinstance(ids, bytes) else body)
