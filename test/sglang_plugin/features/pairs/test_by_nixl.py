# SPDX-License-Identifier: Apache-2.0
"""What is NIXL's alone: its progress thread."""

import sys

from banyan.features.pairs.rank import by_nixl


def test_agent_when_it_is_made_on_a_cpu_then_its_progress_thread_pauses_and_later_agents_are_nixls_own():
    from nixl._api import nixl_agent, nixl_agent_config

    bindings = sys.modules[nixl_agent.__module__].nixlBind
    native = bindings.nixlAgent
    pauses_us = []

    def spy(name, config):
        pauses_us.append(config.pthrDelay)
        return native(name, config)

    bindings.nixlAgent = spy
    try:
        with by_nixl.pausing_progress(by_nixl.PROGRESS_PAUSE_US):
            nixl_agent("pausing", nixl_agent_config(backends=[]))
        nixl_agent("spinning", nixl_agent_config(backends=[]))
    finally:
        bindings.nixlAgent = native
    assert pauses_us == [by_nixl.PROGRESS_PAUSE_US, 0]
