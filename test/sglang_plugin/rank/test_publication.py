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
        kept=kept,
        partner=SimpleNamespace(to_keep=lambda keys: keys),
        backup=SimpleNamespace(offer=kept.extend),
    )


@pytest.fixture
def publication(tier, monkeypatch):
    monkeypatch.setattr(module.requests, "is_lasting", lambda key, page_tokens: not key.startswith("adapter"))
    residency_report = SimpleNamespace(published=lambda keys: None)
    member = SimpleNamespace(guards_adapters=True, tier=tier, residency_report=residency_report)
    kinds = SimpleNamespace(full=member, beside=())
    return Publication(SimpleNamespace(publish=lambda frames, keys: None), kinds, 16)


def test_answer_when_its_page_is_found_in_a_chain_then_no_other_request_is_hashed(publication, tier, monkeypatch):
    learnt, num_hashed = [], 0

    def grown(page_tokens):
        nonlocal num_hashed
        for number in range(50):
            num_hashed += 1
            yield ["root", f"end {number}"]

    monkeypatch.setattr(module.requests, "grown_chains", grown)
    tier.store = SimpleNamespace(is_rootless=lambda key: True, learn=learnt.extend)
    publication.announce(["end 2"])
    publication.publish([0], ["end 2"])
    assert num_hashed == 3 and learnt[-1] == ["root", "end 2"]


def test_chains_when_their_offloads_never_complete_then_only_so_many_are_remembered(publication, tier):
    for number in range(MAX_ANNOUNCED + 1000):
        publication.announce([f"{number}", "more"])
        publication.announce([f"adapter {number}"])
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
