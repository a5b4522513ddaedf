# SPDX-License-Identifier: Apache-2.0
"""How long a prompt counts as about to be held."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from itertools import takewhile

import pytest

from banyan import _native
from banyan.routing import Dispatcher, LoadReport, Prompt, Reason, pending_prefixes
from banyan.routing.load import RankLoad
from banyan.routing.pending_prefixes import PendingPrefixes
from banyan.routing.policies import Affinity, LMetric

BOTH = (0, 1)


class Row(deque):
    """Texts, the latest first."""

    def pop(self):
        return len(super().pop())


@dataclass(frozen=True)
class Text:
    """A prompt, and its prefix fingerprint, whose tokens are letters and whose pages have one token."""

    letters: str

    def __len__(self):
        return len(self.letters)

    def prefix_fingerprint(self):
        return self

    def row(self):
        return Row()

    def most_in_common(self, row):
        return max((self._common(other.letters) for other in row), default=0)

    def oldest_in_common(self, row, num_tokens):
        alike = [place for place, other in enumerate(row) if self._common(other.letters) >= num_tokens]
        return max(alike, default=None)

    def _common(self, letters):
        pairs = zip(self.letters, letters, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def asking(letters, **fields):
    return Prompt(len(letters) + 1, tokens=Text(letters), **fields)


def test_prompts_when_pages_of_another_size_come_then_they_take_the_place_of_those_before():
    small, large = (_native.PromptTokens(None, array("q", range(32)), page).prefix_fingerprint() for page in (8, 16))
    prompts = PendingPrefixes()
    prompts.placed(small, 10)
    prompts.placed(large, 20)
    assert len(prompts) == 1 and prompts.leading_tokens(large) == 32


def test_due_tokens_when_several_begin_alike_then_the_first_that_has_them_all():
    prompts = PendingPrefixes()
    for letters, due_tokens in (("abx", 10), ("abcd", 20), ("abce", 30)):
        prompts.placed(Text(letters), due_tokens)
    assert [prompts.due_tokens(Text("abce"), length) for length in (2, 3, 4)] == [10, 20, 30]
    with pytest.raises(LookupError):
        prompts.due_tokens(Text("xbce"), 1)


def test_leading_tokens_when_prompts_were_placed_then_the_longest_counts():
    prompts = PendingPrefixes()
    assert prompts.leading_tokens(Text("abc")) == 0
    for letters in ("abx", "abcd", "b"):
        prompts.placed(Text(letters), 10)
    assert prompts.leading_tokens(Text("abce")) == 3


def test_computed_when_more_than_was_due_then_forgotten_and_not_before():
    prompts = PendingPrefixes()
    prompts.placed(Text("aa"), 10)
    prompts.placed(Text("bb"), 20)
    prompts.computed(10)
    assert len(prompts) == 2, "the pages of the last one may not be published yet"
    prompts.computed(11)
    assert (prompts.leading_tokens(Text("aa")), prompts.leading_tokens(Text("bb"))) == (0, 2)


def test_placed_when_there_are_too_many_tokens_then_the_oldest_goes(monkeypatch):
    monkeypatch.setattr(pending_prefixes, "MAX_PENDING_TOKENS", 5)
    prompts = PendingPrefixes()
    for letters in ("aa", "bb", "cc"):
        prompts.placed(Text(letters), 10)
    assert [prompts.leading_tokens(Text(letters)) for letters in ("aa", "bb", "cc")] == [0, 2, 2]
    prompts.clear()
    prompts.placed(Text("dddd"), 10)
    assert len(prompts) == 1, "what was cleared does not count"


def test_place_when_a_prefix_is_on_its_way_to_a_rank_then_the_next_follows_it():
    dispatcher = Dispatcher(2, Affinity())
    first = dispatcher.place(asking("system prompt, one"), BOTH, 1.0).rank
    again = dispatcher.place(asking("system prompt, two"), BOTH, 1.1)
    assert (again.rank, again.reason) == (first, Reason.CACHE)
    assert dispatcher.place(asking("another one"), BOTH, 1.2).rank != first


def test_place_when_a_prefix_is_on_its_way_then_it_is_new_there_once():
    dispatcher = Dispatcher(1, LMetric())
    dispatcher.place(asking("a" * 99), {0}, 1.0)
    dispatcher.place(asking("a" * 99), {0}, 1.0)
    assert dispatcher.states({0})[0].pending_prefill_tokens == 100 + 1


@pytest.mark.parametrize(
    ("report", "is_pending"),
    [
        (LoadReport(taken_s=2.0, num_waiting=1, total_prefill_tokens=0), True),
        (LoadReport(taken_s=2.0, num_running=1, total_prefill_tokens=100), True),
        (LoadReport(taken_s=2.0, num_running=1, total_prefill_tokens=0), False),
        (LoadReport(taken_s=2.0), False),
        (LoadReport(taken_s=2.0, ongoing_tokens=50), False),
        (LoadReport(taken_s=0.5), True),
    ],
    ids=[
        "it waits",
        "it was the last",
        "computes no prompts",
        "idle",
        "with a session open",
        "idle before it was sent",
    ],
)
def test_reported_when_the_rank_has_gone_on_then_the_directory_knows_better(report, is_pending):
    dispatcher = Dispatcher(1, LMetric())
    dispatcher.place(asking("a" * 99), {0}, 1.0)
    dispatcher.reported(0, report)
    dispatcher.place(asking("a" * 99), {0}, 3.0)
    pending = dispatcher.states({0})[0].pending_prefill_tokens
    on_its_way = 100 if report.taken_s < 1.0 else 0
    assert pending - on_its_way == (1 if is_pending else 100)


def test_reported_when_a_batch_was_under_way_at_its_placement_then_the_end_of_that_one_does_not_count():
    load = RankLoad()
    load.placed(0, 1.0, num_prompt_tokens=100, num_new_tokens=100, prefix_fingerprint=Text("a" * 99))
    # The batch before it has more tokens than it; then comes its own.
    for taken_s, total_tokens, leading_tokens in ((2.0, 500, 99), (3.0, 500, 99), (4.0, 600, 0)):
        load.reported(LoadReport(taken_s=taken_s, num_running=1, total_prefill_tokens=total_tokens))
        assert load.pending.leading_tokens(Text("a" * 99)) == leading_tokens


def test_reported_when_a_prompt_is_between_two_chunks_then_its_prefix_is_still_coming():
    dispatcher = Dispatcher(1, LMetric())
    dispatcher.place(asking("a" * 99), {0}, 1.0)
    dispatcher.reported(0, LoadReport(taken_s=2.0, pending_prefill_tokens=50, ongoing_tokens=49))
    dispatcher.place(asking("a" * 99), {0}, 3.0)
    assert dispatcher.states({0})[0].pending_prefill_tokens == 50 + 1


def test_count_when_the_directory_knows_more_than_is_pending_then_the_directory_counts():
    dispatcher = Dispatcher(1, LMetric())
    dispatcher.place(asking("aab"), {0}, 1.0)
    dispatcher.place(asking("aaaa", cached_tokens=(3,)), {0}, 1.0)
    assert dispatcher.states({0})[0].pending_prefill_tokens == 4 + 2


def test_place_when_a_rank_holds_all_of_it_then_nobody_is_pending():
    dispatcher = Dispatcher(2, Affinity())
    first = dispatcher.place(asking("abc"), BOTH, 1.0).rank
    held = [0, 0]
    held[1 - first] = 3
    assert dispatcher.place(asking("abc", cached_tokens=held), BOTH, 1.0).rank == 1 - first
