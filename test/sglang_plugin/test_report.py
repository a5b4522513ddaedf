# SPDX-License-Identifier: Apache-2.0
"""Cached tokens as clients see them: no source is lost on the way into an OpenAI answer."""

import pytest
from sglang.srt.plugins import load_plugins

SOURCES = {"device": 16, "host": 32, "peer": 64, "storage": 128}


@pytest.fixture(scope="module")
def answers():
    """The modules that build OpenAI answers; each has imported the hooked function by name."""
    load_plugins()
    from sglang.srt.entrypoints.openai import serving_chat, serving_completions, utils

    return serving_chat, serving_completions, utils


def test_openai_breakdown_when_a_peer_held_tokens_then_they_count_as_host(answers):
    for module in answers:
        details = module.cached_tokens_details_from_dict(SOURCES)
        assert details.model_dump() == {"device": 16, "host": 96, "storage": 128}


def test_openai_breakdown_when_the_server_is_stock_then_nothing_is_added(answers):
    for module in answers:
        assert module.cached_tokens_details_from_dict({"device": 16, "host": 32}).model_dump() == {
            "device": 16,
            "host": 32,
        }
