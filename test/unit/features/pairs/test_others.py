# SPDX-License-Identifier: Apache-2.0
"""Each server of a pair remembers what the other one's part makes necessary."""

import weakref

from banyan.features.pairs.others import Others
from banyan.features.pairs.roles import Role


def test_decode_server_when_a_prompt_came_then_it_keeps_the_answer_and_looks_nothing_up():
    others = Others(Role.DECODE, lambda: 0.0)
    others.came(["a", "b"], "known")
    assert others.to_keep(["a", "b", "c"]) == ["c"]
    assert others.arrivals.to_look_up(1) == []


def test_prefill_server_when_a_prompt_came_then_it_keeps_all_and_looks_it_up_again():
    others = Others(Role.PREFILL, lambda: 0.0)
    others.came(["a", "b"], "known")
    assert others.to_keep(["a", "b", "c"]) == ["a", "b", "c"]
    assert others.arrivals.to_look_up(1) == ["known"]


def test_decode_server_when_it_takes_back_then_its_arena_has_prompts_too_and_only_answers_are_written():
    others = Others(Role.DECODE, lambda: 0.0, takes_back=True)
    others.came(["a", "b"], "known")
    assert others.to_keep(["a", "b", "c", "d"]) == ["a", "b", "c", "d"]
    # The next turn comes before the copy to the arena has landed.
    others.came(["a", "b", "c", "d"], "known")
    assert others.to_write(["a", "b", "c"]) == ["c"]
    assert others.to_write(["d"]) == ["d"]
    assert others.to_write(["c", "d"]) == [], "once"


def test_decode_server_when_its_caches_were_emptied_then_what_was_handed_over_before_is_an_answer_now():
    others = Others(Role.DECODE, lambda: 0.0, takes_back=True)
    others.came(["a", "b", "c"], "known")
    others.forget()
    others.came(["a"], "known")
    assert others.to_keep(["a", "b", "c"]) == ["a", "b", "c"]
    assert others.to_write(["a", "b", "c"]) == ["b", "c"]


def test_server_when_it_takes_nothing_back_then_what_came_to_its_arena_is_written():
    assert Others(Role.PREFILL, lambda: 0.0).to_write(["a", "b"]) == ["a", "b"]
    assert Others(Role.DECODE, lambda: 0.0).to_write(["c"]) == ["c"]


def test_prefill_server_when_its_tier_goes_then_nothing_of_it_stays_with_a_prompt_that_has_just_come():
    """Its views of the peers would stay with it, and the next tier could not have them."""

    class Tier:
        def look_again(self): ...

    others, tier = Others(Role.PREFILL, lambda: 0.0), Tier()
    others.came(["a"], tier.look_again)
    gone = weakref.ref(tier)
    others.forget()
    del tier
    assert gone() is None
