# SPDX-License-Identifier: Apache-2.0
"""What is remembered of pages on their way: no more than so many, and what is forgotten is not kept."""

from types import SimpleNamespace

import pytest

from banyan.sglang_plugin.rank import publication as module
from banyan.sglang_plugin.rank.publication import MAX_ANNOUNCED, Publication


@pytest.fixture
def tier():
    kept = []
    return SimpleNamespace(
        store=None,
        is_lasting=True,
        kept=kept,
        partner=SimpleNamespace(to_keep=lambda keys: keys),
        backup=SimpleNamespace(offer=kept.extend),
    )


@pytest.fixture
def publication(tier, monkeypatch):
    monkeypatch.setattr(module.requests, "is_lasting_inserted", lambda: tier.is_lasting)
    residency_report = SimpleNamespace(published=lambda keys: None)
    member = SimpleNamespace(guards_adapters=True, tier=tier, residency_report=residency_report)
    kinds = SimpleNamespace(full=member, beside=())
    return Publication(SimpleNamespace(publish=lambda frames, keys: None, is_stopped=False), kinds, 16)


@pytest.mark.parametrize("chain", [["root", "end"], ["another"], None], ids=["has it", "has it not", "unknown"])
def test_answer_when_the_page_before_is_not_known_then_only_the_chain_that_has_both_is_learnt(
    publication, tier, monkeypatch, chain
):
    learnt = []
    monkeypatch.setattr(module.requests, "inserted_chain", lambda page_tokens: chain)
    tier.store = SimpleNamespace(is_rootless=lambda key: key == "end", learn=learnt.extend)
    publication.announce(["known"])
    assert learnt == []
    publication.announce(["end"])
    assert learnt == ([["root", "end"]] if chain == ["root", "end"] else [])
    tier.is_lasting = False
    publication.announce(["end"])
    assert len(learnt) <= 1, "an adapter's is not kept"


def test_chains_when_their_offloads_never_complete_then_only_so_many_are_remembered(publication, tier):
    for number in range(MAX_ANNOUNCED + 1000):
        publication.announce([f"{number}", "more"])
        tier.is_lasting = False
        publication.announce([f"adapter {number}"])
        tier.is_lasting = True
    assert len(publication._lasting) == MAX_ANNOUNCED
    publication.publish([0], ["999"])
    assert tier.kept == [], "it may have been an adapter's, for all that is known"
    publication.publish([0], ["1000"])
    publication.publish([0], [f"{MAX_ANNOUNCED + 999}"])
    publication.publish([0], [f"adapter {MAX_ANNOUNCED + 999}"])
    assert tier.kept == ["1000", f"{MAX_ANNOUNCED + 999}"]


def test_chain_when_it_is_offered_again_before_it_is_complete_then_both_are_kept(publication, tier):
    for _ in range(2):
        publication.announce(["a"])
    for _ in range(3):
        publication.publish([0], ["a"])
    assert tier.kept == ["a", "a"] and not publication._lasting


def test_chains_when_the_rank_is_silent_then_they_are_forgotten_as_they_come(publication, tier):
    publication.hold_back("for a reason")
    for number in range(10):
        publication.announce([f"{number}"])
        publication.publish([0], [f"{number}"])
    assert not publication._lasting and tier.kept == []
