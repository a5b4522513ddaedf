# SPDX-License-Identifier: Apache-2.0
"""NIXL's agents, as Banyan makes them: the only module that calls NIXL to read another node's memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

MOST_PEERS = 16
"""One for each start of the other node's NIXL process, and for each part of the arena that it comes to know."""

LENDING_PAUSE_US = 20_000
"""As ``pausing_progress`` says, of one that lends: most of the time nobody reads."""


@contextmanager
def pausing_progress(pause_us: int) -> Iterator[None]:
    """The progress threads of NIXL agents that are made in here wait so long between their polls; what UCX can announce
    ends a wait at once. Its Python class has no argument for that, and sets the pause to zero; the native one that it
    makes is the next place to say it."""
    from nixl._api import nixl_agent

    bindings = sys.modules[nixl_agent.__module__].nixlBind
    native = bindings.nixlAgent

    def make(name: str, config: Any) -> Any:
        config.pthrDelay = pause_us
        return native(name, config)

    bindings.nixlAgent = make
    try:
        yield
    finally:
        bindings.nixlAgent = native


class Agent:
    """One process's. One thread. ``answers``: whether others read here, which a thread of NIXL's sees to."""

    def __init__(self, name: str, backend: str, *, answers: bool) -> None:
        """
        Raises:
            ValueError: where NIXL has no such backend.
        """
        # Its log goes to stdout as that is when it is imported.
        with redirect_stdout(sys.stderr):
            from nixl._api import nixl_agent, nixl_agent_config
        with pausing_progress(LENDING_PAUSE_US):
            self._agent: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=answers, backends=[]))
        if backend not in self._agent.get_plugin_list():
            raise ValueError(f"NIXL has no plugin {backend}: it has {', '.join(self._agent.get_plugin_list())}")
        self._agent.create_backend(backend, {})
        self._peers: dict[bytes, str] = {}

    def register(self, address: int, num_bytes: int) -> bytes:
        """Let others read it, or read into it; what describes this agent from now on."""
        self._agent.register_memory([(address, num_bytes, 0, "")], mem_type="DRAM")
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def meet(self, metadata: bytes) -> str:
        """The name of the agent that it describes."""
        if metadata not in self._peers:
            if len(self._peers) == MOST_PEERS:
                raise OSError("the other node has been too many agents: another process forgets them")
            name = self._agent.add_remote_agent(metadata)
            self._peers[metadata] = name.decode() if isinstance(name, bytes) else name
        return self._peers[metadata]

    def begin(self, peer: str, to: Any, from_: Any, /) -> Any:
        local, remote = (self._agent.get_xfer_descs(moves, mem_type="DRAM") for moves in (to, from_))
        handle = self._agent.initialize_xfer("READ", local, remote, peer)
        self._agent.transfer(handle)
        return handle

    def is_done(self, handle: Any, /) -> bool:
        state = self._agent.check_xfer_state(handle)
        if state == "PROC":
            return False
        if state != "DONE":
            raise OSError(f"a read ended as {state}")
        self._agent.release_xfer_handle(handle)
        return True
