# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest

from banyan.features.told import table
from banyan.features.told.table import Refused, Told


class Rig:
    def __init__(self, *, num_pages: int = 100, pool_pages: int = 100, share: float = 0.1) -> None:
        self.kept: set[str] = set()
        self.in_pool: set[str] = set()
        self.ends: set[str] = set()
        self.in_store: set[str] = set()
        self.now_s = 0.0
        self.told = Told(
            self.kept,
            self.in_pool,
            self.ends,
            sizes=lambda: (num_pages, pool_pages),
            share=share,
            changed=self.changed,
            clock=lambda: self.now_s,
        )

    def changed(self, came: list[str], gone: list[str]) -> None:
        assert not self.in_store & set(came) and self.in_store >= set(gone)
        self.in_store.update(came)
        self.in_store.difference_update(gone)


def chain(name: str, num_pages: int, stem: list[str] | None = None) -> list[str]:
    stem = stem or []
    return [*stem, *(f"{name} {page}" for page in range(len(stem), num_pages))]


def test_pin_when_its_time_is_over_then_nothing_of_it_is_kept() -> None:
    rig = Rig()
    rig.told.pin("t", chain("a", 5), 10.0)
    rig.now_s = 9.9
    rig.told.expire()
    assert rig.kept == rig.in_pool == rig.in_store == set(chain("a", 5))
    rig.now_s = 10.0
    rig.told.expire()
    assert not rig.kept and not rig.in_pool and not rig.in_store and not len(rig.told)


def test_pin_when_over_the_budget_of_its_tenant_then_refused_in_one_line_and_what_was_pinned_stays() -> None:
    rig = Rig()
    rig.told.pin("t", chain("a", 8), 10.0)
    with pytest.raises(Refused, match=r"^3 pages more .* budget of 10 pages .* 8 are kept: .*--banyan-told-share"):
        rig.told.pin("t", chain("b", 3), 10.0)
    assert rig.kept == set(chain("a", 8)) and rig.told.num_refused == 1
    rig.told.pin("another", chain("c", 10), 10.0)


def test_pins_when_tenants_are_made_up_then_all_together_keep_half_of_the_tier() -> None:
    rig = Rig()
    for tenant in range(5):
        rig.told.pin(f"t{tenant}", chain(f"t{tenant}", 10), 10.0)
    with pytest.raises(Refused, match="all tenants together"):
        rig.told.pin("one more", chain("x", 1), 10.0)
    assert len(rig.kept) == 50


def test_pin_when_prefixes_share_their_beginning_then_its_pages_count_once() -> None:
    rig = Rig()
    stem = chain("stem", 6)
    for number in range(4):
        rig.told.pin("t", chain(f"b{number}", 7, stem), 10.0 + number)
    assert len(rig.kept) == 10
    rig.now_s = 12.0
    rig.told.expire()
    assert rig.kept == {*chain("b3", 7, stem)}


def test_pin_when_there_is_more_of_it_than_the_pool_keeps_then_the_arena_alone_keeps_it() -> None:
    rig = Rig(num_pages=1000, pool_pages=100)
    rig.told.pin("t", chain("small", 4), 10.0)
    rig.told.pin("t", chain("large", 90), 10.0)
    assert len(rig.kept) == 94 and rig.in_pool == set(chain("small", 4))


def test_pool_when_its_share_is_used_then_what_was_retained_first_leaves_it_and_stays_elsewhere() -> None:
    rig = Rig(num_pages=1000, pool_pages=100)
    rig.told.retain("t", chain("a", 6), 10.0)
    rig.told.retain("t", chain("b", 6), 10.0)
    assert rig.in_pool == {*chain("b", 6)}
    rig.told.pin("t", chain("pin", 5), 10.0)
    assert rig.in_pool == {*chain("pin", 5)}
    rig.told.retain("t", chain("c", 5), 10.0)
    rig.told.retain("t", chain("d", 6), 10.0)
    assert rig.in_pool == {*chain("pin", 5), *chain("c", 5)}, "beside the pin there is no room for it"
    assert len(rig.kept) == 6 + 6 + 5 + 5 + 6 and [one.is_in_pool for one in rig.told].count(True) == 2


def test_pool_when_all_tenants_have_used_theirs_then_the_oldest_of_any_leaves_it_and_of_a_chain_its_own_last() -> None:
    rig = Rig(num_pages=1000, pool_pages=100)
    rig.told.retain("grows", chain("g", 4), 10.0)
    for number in range(4):
        rig.told.retain(f"t{number}", chain(f"t{number}", 10), 10.0)
    rig.told.pin("t4", chain("t4", 6), 10.0)
    rig.told.retain("grows", chain("g", 8), 10.0)
    others = [chain(f"t{number}", 10) for number in (1, 2, 3)]
    assert rig.in_pool == {*chain("g", 8), *itertools.chain(*others), *chain("t4", 6)}


def test_retain_when_the_budget_is_used_then_the_oldest_retained_makes_room_and_no_pin_does() -> None:
    rig = Rig()
    rig.told.pin("t", chain("pin", 4), 10.0)
    assert rig.told.retain("t", chain("a", 3), 10.0) == 3
    assert rig.told.retain("t", chain("b", 3), 10.0) == 3
    assert rig.told.retain("t", chain("c", 2), 10.0) == 2
    assert rig.kept == {*chain("pin", 4), *chain("b", 3), *chain("c", 2)}
    assert rig.told.retain("t", chain("long", 50), 10.0) == 6, "its beginning"
    rig.told.pin("t", chain("second", 6), 10.0)
    assert rig.kept == {*chain("pin", 4), *chain("second", 6)}
    assert rig.told.retain("t", chain("d", 3), 10.0) == 0


@pytest.mark.parametrize("num_pinned", [0, 100], ids=["all of its budget is left", "its pins have it"])
def test_retain_when_it_is_more_than_its_tenant_may_keep_then_others_lose_nothing(num_pinned: int) -> None:
    rig = Rig(num_pages=1000)
    rig.told.retain("other", chain("b", 50), 10.0)
    if num_pinned:
        rig.told.pin("t", chain("pin", num_pinned), 10.0)
    assert rig.told.retain("t", chain("a", 130), 10.0) == 100 - num_pinned
    assert rig.kept >= set(chain("b", 50))


def test_retain_when_it_is_more_than_its_tenant_may_keep_then_others_make_room_for_what_it_may() -> None:
    rig = Rig(num_pages=1000)
    for number in range(5):
        rig.told.retain(f"t{number}", chain(f"t{number}", 100), 10.0)
    assert rig.told.retain("t", chain("a", 130), 10.0) == 100
    assert rig.kept == {*chain("a", 100), *(key for number in range(1, 5) for key in chain(f"t{number}", 100))}


@pytest.mark.parametrize("is_pin", [True, False], ids=["pinned", "retained"])
def test_chain_when_its_beginning_was_retained_first_then_what_is_none_of_it_makes_room(is_pin: bool) -> None:
    rig = Rig(num_pages=1000)
    grown = chain("a", 70)
    rig.told.retain("t", grown[:60], 10.0)
    rig.told.retain("t", chain("b", 40), 10.0)
    if is_pin:
        rig.told.pin("t", grown, 10.0)
    else:
        assert rig.told.retain("t", grown, 10.0) == 70
    assert rig.kept == set(grown) and rig.told.num_refused == 0


def test_chain_when_only_its_own_beginning_could_make_room_then_that_much_of_it_is_kept() -> None:
    rig = Rig(num_pages=1000)
    grown = chain("a", 130)
    rig.told.retain("t", grown[:60], 10.0)
    assert rig.told.retain("t", grown, 10.0) == 100 and rig.kept == set(grown[:100])


def test_retain_when_a_conversation_grows_then_one_prefix_is_remembered_and_nothing_goes_and_comes_back() -> None:
    rig = Rig()
    for turn in range(1, 9):
        assert rig.told.retain("t", chain("talk", turn), 10.0) == turn
        rig.now_s += 1.0
        assert len(rig.told) == 1 and rig.in_store == set(chain("talk", turn))


def test_pin_when_told_again_then_its_time_begins_anew_and_to_retain_it_takes_nothing_from_it() -> None:
    rig = Rig()
    rig.told.pin("t", chain("a", 5), 10.0)
    rig.now_s = 8.0
    rig.told.pin("t", chain("a", 5), 10.0)
    assert rig.told.retain("t", chain("a", 5), 1.0) == 5
    rig.now_s = 17.0
    rig.told.expire()
    assert len(rig.kept) == 5


def test_release_when_a_prompt_begins_or_continues_what_is_kept_then_of_this_tenant_alone_it_goes() -> None:
    rig = Rig()
    rig.told.pin("t", chain("a", 5), 10.0)
    rig.told.pin("u", chain("u", 5), 10.0)
    assert rig.told.release("t", chain("b", 3)) == 0 and rig.told.release("u", chain("a", 5)) == 0
    assert rig.told.release("t", chain("a", 7)) == 1 and rig.told.release("u", chain("u", 2)) == 1
    assert not rig.kept


def test_session_when_closed_then_what_was_kept_for_it_goes_and_nothing_else() -> None:
    rig = Rig()
    rig.told.pin("t", chain("a", 2), 10.0, "one")
    rig.told.retain("t", chain("b", 2), 10.0, "one")
    rig.told.pin("t", chain("c", 2), 10.0, "two")
    rig.told.pin("t", chain("d", 2), 10.0)
    assert rig.told.close("one") == 2 and not rig.told.close("none")
    assert rig.kept == {*chain("c", 2), *chain("d", 2)}


@pytest.mark.parametrize("first", [None, "another"], ids=["for no session", "for another one"])
def test_pin_when_a_session_pins_the_same_prompt_then_it_stays_for_its_own_time(first: str | None) -> None:
    rig = Rig()
    rig.told.pin("t", chain("a", 10), 86_400.0, first)
    rig.told.pin("t", chain("a", 10), 300.0, "s")
    rig.told.close("s")
    assert len(rig.kept) == len(rig.in_pool) == 10 and rig.ends == {"a 9"}
    rig.told.pin("t", chain("a", 10), 300.0, "s")
    rig.now_s = 301.0
    rig.told.expire()
    assert len(rig.kept) == 10 and [one.session for one in rig.told] == [first]


@pytest.mark.parametrize("is_pin_first", [True, False], ids=["pinned, then retained", "retained, then pinned"])
def test_retain_when_the_same_prompt_is_pinned_for_less_then_it_stays_for_its_own_time(is_pin_first: bool) -> None:
    rig = Rig()
    for is_pin in (is_pin_first, not is_pin_first):
        if is_pin:
            rig.told.pin("t", chain("a", 10), 5.0)
        else:
            assert rig.told.retain("t", chain("a", 10), 3600.0) == 10
    rig.now_s = 6.0
    rig.told.expire()
    assert rig.kept == set(chain("a", 10)) and [one.is_pin for one in rig.told] == [False]


def test_share_when_it_is_nothing_then_pins_are_refused_and_nothing_is_retained() -> None:
    rig = Rig(share=0.0)
    with pytest.raises(Refused, match="budget of 0 pages"):
        rig.told.pin("t", chain("a", 1), 10.0)
    assert rig.told.retain("t", chain("a", 1), 10.0) == 0


def test_prefixes_when_there_are_as_many_as_may_be_then_a_pin_is_refused_or_takes_the_place_of_a_retained_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "MOST_PREFIXES", 6)
    rig = Rig(share=0.5)
    rig.told.retain("t", chain("r", 1), 10.0)
    for name in "abc":
        rig.told.pin("t", chain(name, 1), 10.0)
    assert rig.kept == {"a 0", "b 0", "c 0"}
    with pytest.raises(Refused, match="3 prefixes of the tenant's and 3 of all"):
        rig.told.pin("t", chain("d", 1), 10.0)
    assert rig.told.retain("t", chain("r", 1), 10.0) == 0 and len(rig.told) == 3
    rig.told.pin("t", chain("a", 1), 20.0)
    assert len(rig.told) == 3, "told again"


def test_prefixes_when_a_tenant_has_many_small_ones_then_others_have_place_and_keep_what_they_retain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "MOST_PREFIXES", 8)
    rig = Rig(num_pages=1000, share=0.25)
    assert rig.told.retain("quiet", chain("q", 3), 10.0) == 3
    for number in range(20):
        rig.told.retain("flood", chain(f"f{number}", 1), 10.0)
    rig.told.pin("flood", chain("g", 1), 10.0)
    rig.told.pin("flood", chain("h", 1), 10.0)
    with pytest.raises(Refused, match="that is the most"):
        rig.told.pin("flood", chain("i", 1), 10.0)
    assert rig.kept == {*chain("q", 3), "g 0", "h 0"}
    rig.told.pin("another", chain("a", 1), 10.0)


@pytest.mark.parametrize("ask", [Told.pin, Told.retain], ids=["pinned", "retained"])
def test_prefixes_when_pins_leave_no_place_then_what_is_not_kept_throws_nothing_away(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[..., object]
) -> None:
    """Neither for the want of a place nor, before that, to have room for its pages."""
    monkeypatch.setattr(table, "MOST_PREFIXES", 8)
    monkeypatch.setattr(table, "MOST_KEYS", 60)
    rig = Rig(num_pages=40, share=0.5)
    rig.told.retain("quiet", chain("q", 8), 10.0)
    rig.told.retain("quiet", chain("r", 8), 10.0)
    for number in range(4):
        rig.told.pin("loud", chain(f"p{number}", 1), 10.0)
    before = set(rig.kept)
    with contextlib.suppress(Refused):
        assert ask(rig.told, "loud", chain("more", 2), 10.0) == 0
    assert rig.kept == before
    rig.told.release("loud", chain("p0", 1))
    with contextlib.suppress(Refused):
        assert ask(rig.told, "loud", chain("long", 60), 10.0) == 0, "more keys than are left beside its own"
    assert rig.kept == before - {"p0 0"}


@pytest.mark.parametrize("ask", [Told.pin, Told.retain], ids=["pinned", "retained"])
def test_keys_when_pins_leave_too_few_then_what_is_not_kept_throws_nothing_away(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[..., object]
) -> None:
    monkeypatch.setattr(table, "MOST_KEYS", 60)
    rig = Rig(num_pages=400, share=0.5)
    rig.told.retain("quiet", chain("q", 8), 10.0)
    rig.told.pin("loud", chain("p", 6), 10.0)
    with contextlib.suppress(Refused):
        assert ask(rig.told, "another", chain("long", 55), 10.0) == 0
    assert rig.kept == {*chain("q", 8), *chain("p", 6)}
    rig.told.pin("another", chain("long", 54), 10.0)
    assert rig.kept == {*chain("p", 6), *chain("long", 54)}


def test_keys_when_many_prompts_share_a_long_beginning_then_what_is_remembered_of_them_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "MOST_KEYS", 200)
    rig = Rig(num_pages=1000, share=0.5)
    stem = chain("stem", 30)
    for number in range(3):
        rig.told.pin("t", chain(f"b{number}", 31, stem), 10.0)
    with pytest.raises(Refused, match="fewer of long prompts"):
        rig.told.pin("t", chain("b3", 31, stem), 10.0)
    assert sum(len(one.keys) for one in rig.told) == 93
    rig.told.pin("u", chain("long", 101), 10.0)
    rig.told.release("t", stem)
    assert rig.told.retain("t", chain("b3", 31, stem), 10.0) == 31


def test_pin_when_what_is_retained_behind_it_has_no_room_then_it_stays_a_pin_for_its_time() -> None:
    rig = Rig()
    rig.told.pin("t", chain("a", 10), 100.0)
    assert rig.told.retain("t", chain("a", 15), 5.0) == 10
    rig.now_s = 6.0
    rig.told.retain("t", chain("other", 3), 5.0)
    rig.told.expire()
    assert rig.kept == {*chain("a", 10)}


def test_pin_when_a_longer_one_does_not_fit_the_pool_then_the_pool_keeps_what_it_kept() -> None:
    rig = Rig(num_pages=1000, pool_pages=100)
    rig.told.pin("t", chain("a", 8), 10.0)
    rig.told.pin("t", chain("a", 20), 10.0)
    assert rig.in_pool == {*chain("a", 8)} and rig.kept == {*chain("a", 20)}
    rig.told.pin("t", chain("a", 30), 10.0)
    assert len(rig.told) == 2


def test_pin_when_another_rank_refuses_it_then_what_was_pinned_before_is_pinned_as_it_was() -> None:
    rig = Rig()
    rig.told.pin("t", chain("a", 3), 10.0)
    rig.told.pin("t", chain("a", 6), 20.0, name="1")
    rig.told.take_back("1")
    assert rig.kept == rig.in_pool == {*chain("a", 3)} and len(rig.told) == 1
    rig.told.take_back("1")
    assert rig.kept == {*chain("a", 3)}, "it was granted"
    rig.now_s = 10.0
    rig.told.expire()
    assert not rig.kept


def test_pin_when_taken_back_where_it_was_refused_then_nothing_goes() -> None:
    rig = Rig()
    rig.told.pin("t", chain("a", 3), 10.0)
    rig.told.take_back("told elsewhere")
    rig.told.pin("u", chain("b", 2), 10.0)
    rig.now_s = 1.0
    with pytest.raises(Refused):
        rig.told.pin("u", chain("b", 90), 10.0, name="1")
    rig.told.take_back("1")
    assert rig.kept == {*chain("a", 3), *chain("b", 2)}


def test_pin_when_another_worker_has_told_more_before_it_is_taken_back_then_it_goes_and_no_other() -> None:
    rig = Rig()
    rig.told.pin("t", chain("a", 4), 10.0, name="1")
    rig.told.pin("t", chain("b", 2), 10.0, name="2")
    rig.told.take_back("1")
    assert rig.kept == {*chain("b", 2)}
    for number in range(table.MOST_LATEST + 1):
        rig.told.pin("t", chain(f"c {number}", 1), 10.0, name=f"c {number}")
        rig.told.release("t", chain(f"c {number}", 1))
    rig.told.take_back("2")
    assert rig.kept == {*chain("b", 2)}


def test_pin_when_another_worker_has_pinned_the_same_before_it_is_taken_back_then_that_stays() -> None:
    rig = Rig()
    rig.told.pin("t", chain("a", 4), 10.0, name="1")
    rig.told.pin("t", chain("a", 4), 20.0, name="2")
    rig.told.take_back("1")
    assert [one.expires_s for one in rig.told] == [20.0]


@pytest.mark.parametrize("is_pin", [True, False], ids=["pinned", "retained"])
def test_pin_when_another_worker_has_pinned_what_it_took_in_before_it_is_taken_back_then_that_stays(
    is_pin: bool,
) -> None:
    rig = Rig()
    if is_pin:
        rig.told.pin("t", chain("a", 3), 10.0)
    else:
        rig.told.retain("t", chain("a", 3), 10.0)
    rig.told.pin("t", chain("a", 6), 30.0, name="1")
    rig.told.pin("t", chain("a", 3), 20.0)
    rig.told.take_back("1")
    assert [(one.is_pin, one.expires_s) for one in rig.told] == [(True, 20.0)]


def test_pin_when_it_is_refused_then_what_prompts_with_one_beginning_retained_stays() -> None:
    """Their pages count once, however many prompts have them."""
    rig = Rig(num_pages=1000, share=0.1)
    for number in range(5):
        rig.told.pin(f"p{number}", chain(f"p{number}", 90), 10.0)
    stem = chain("stem", 30)
    for number in range(4):
        rig.told.retain("t", chain(f"b{number}", 32, stem), 10.0)
    kept = set(rig.kept)
    with pytest.raises(Refused, match="all tenants together"):
        rig.told.pin("u", chain("u", 60), 10.0)
    assert rig.kept == kept and len(kept) == 450 + 38
    rig.told.pin("u", chain("u", 50), 10.0)


def test_pin_when_its_own_retained_beginning_would_have_to_go_for_it_then_that_stays() -> None:
    rig = Rig(num_pages=1000)
    rig.told.retain("t", chain("a", 130)[:60], 10.0)
    with pytest.raises(Refused, match="70 pages more"):
        rig.told.pin("t", chain("a", 130), 10.0)
    assert rig.kept == set(chain("a", 130)[:60])


def test_pin_when_much_that_is_retained_makes_room_then_all_of_it_is_told_at_once() -> None:
    rig, told = Rig(num_pages=1000), []
    rig.told._changed = lambda came, gone: told.append((len(came), len(gone)))
    for number in range(100):
        rig.told.retain("t", chain(f"a{number}", 1), 10.0)
    told.clear()
    rig.told.pin("t", chain("p", 80), 10.0)
    assert told == [(0, 80), (80, 0)] and rig.kept == {*chain("p", 80), *(f"a{number} 0" for number in range(80, 100))}


def test_retain_when_another_rank_refuses_it_then_what_was_retained_before_is_as_it_was_and_no_pin_goes() -> None:
    rig = Rig(num_pages=1000)
    assert rig.told.retain("t", chain("long", 130), 10.0, name="1") == 100
    rig.told.take_back("1")
    assert not rig.kept
    rig.told.retain("t", chain("a", 3), 10.0)
    rig.told.retain("t", chain("a", 6), 20.0, name="2")
    rig.told.take_back("2")
    assert rig.kept == {*chain("a", 3)}
    rig.told.pin("t", chain("a", 3), 10.0)
    rig.told.retain("t", chain("a", 3), 10.0, name="3")
    rig.told.take_back("3")
    assert rig.kept == {*chain("a", 3)} and [one.is_pin for one in rig.told] == [True]


@pytest.mark.parametrize("seed", range(8))
def test_table_when_told_at_random_then_budgets_hold_and_all_that_is_kept_is_somebodys(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(num_pages=200, pool_pages=80, share=0.2)
    for number in range(400):
        tenant = rng.choice("tuvwxyz")
        stem = chain(f"{tenant} stem {rng.randrange(2)}", rng.randrange(4))
        pages = chain(f"{tenant} {rng.randrange(3)}", len(stem) + rng.randrange(1, 12), stem)
        keys = list(itertools.accumulate(pages, "{} {}".format))
        act, session = rng.randrange(7), rng.choice([None, "s"])
        try:
            if act < 2:
                rig.told.pin(tenant, keys, rng.uniform(1, 20), session, name=str(number))
                if rng.random() < 0.3:
                    rig.told.take_back(str(number))
            elif act < 4:
                rig.told.expire()
                pinned = {key for one in rig.told if one.is_pin for key in one.keys}
                rig.told.retain(tenant, keys, rng.uniform(1, 20), session, name=str(number))
                if rng.random() < 0.3:
                    rig.told.take_back(str(number))
                assert pinned <= rig.kept
            elif act == 4:
                rig.told.release(tenant, keys)
            elif act == 5:
                rig.told.take_back(str(number - rng.randrange(1, 20)))
            elif rng.random() < 0.1:
                rig.told.close("s")
        except Refused:
            pass
        rig.now_s += rng.random()
        prefixes = list(rig.told)
        assert rig.kept == rig.in_store == {key for one in prefixes for key in one.keys}
        assert rig.in_pool == {key for one in prefixes if one.is_in_pool for key in one.keys}
        assert rig.ends == {one.keys[-1] for one in prefixes if one.is_in_pool}
        for other in "tuvwxyz":
            of_tenant = {key for one in prefixes if one.tenant == other for key in one.keys}
            assert len(of_tenant) <= 40 and len(of_tenant & rig.in_pool) <= 16
        assert len(rig.kept) <= 100 and len(rig.in_pool) <= 40
        assert rig.told._num_prefixes == Counter(one.tenant for one in prefixes)
        assert rig.told._num_keys.total() == sum(len(one.keys) for one in prefixes)
    rig.now_s += 100
    rig.told.expire()
    assert not rig.kept and not rig.in_pool and not len(rig.told)
