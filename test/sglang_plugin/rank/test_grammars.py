# SPDX-License-Identifier: Apache-2.0
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import grammars


def test_grammars_when_clients_ask_for_ever_new_ones_then_the_last_are_kept(monkeypatch):
    monkeypatch.setattr(runtime, "config", object)
    backend = BaseGrammarBackend()
    for number in range(2000):
        backend.set_cache(("regex", str(number)), number)
        grammars.after_set_cache(None, backend, ("regex", str(number)), number)
        assert len(backend.cache) <= grammars.MOST_GRAMMARS
    kept = list(backend.cache.values())
    assert len(kept) >= grammars.MOST_GRAMMARS // 2 and kept == list(range(2000 - len(kept), 2000))
