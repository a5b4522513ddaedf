# SPDX-License-Identifier: Apache-2.0
import hashlib

import pytest

from banyan.telemetry import CopySample


def each(holders):
    """What is known of pages, asked for all of them at once."""
    return lambda pages: map(holders, pages)


@each
def one_pool(page):
    return True, 1, False


def key(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


def test_copies_when_half_of_the_pages_lie_in_two_pools_then_the_shares_say_so():
    sample, pages = CopySample(), [key(number) for number in range(100)]
    sample.published(pages, one_pool)
    twice = set(pages[:50])
    copies = sample.look(each(lambda one: (True, 2 if one in twice else 1, False)))
    assert (copies.num_pages, copies.duplicate_share) == (100, 0.5)
    assert copies.distinct_share == pytest.approx(0.75)


def test_copies_when_the_arena_holds_a_page_then_it_is_a_duplicate_and_still_distinct_among_the_pools():
    sample = CopySample()
    sample.published([key(0)], one_pool)
    copies = sample.look(each(lambda one: (True, 1, True)))
    assert (copies.duplicate_share, copies.distinct_share) == (1.0, 1.0)


def test_sample_when_a_page_has_left_the_pool_then_it_is_not_counted_again():
    sample = CopySample()
    sample.published([key(0), key(1)], one_pool)
    assert sample.look(each(lambda one: (one == key(0), 1, False))).num_pages == 1
    assert sample.look(one_pool).num_pages == 1
    sample.clear()
    assert sample.look(one_pool).distinct_share == 1.0


def test_sample_when_pages_are_many_then_it_stays_small_and_two_ranks_keep_the_same_up_to_a_bound():
    one, other = CopySample(64), CopySample(64)
    for number in range(10_000):
        one.published([key(number)], one_pool)
    other.published([key(number) for number in range(10_000)], one_pool)
    kept, kept_too = set(), set()
    assert 16 <= one.look(each(lambda page: (not kept.add(page), 1, False))).num_pages <= 64
    other.look(each(lambda page: (not kept_too.add(page), 1, False)))
    assert kept <= kept_too or kept >= kept_too


def test_sample_when_many_pages_have_come_and_gone_unlooked_at_then_it_is_still_one_of_those_that_are_held():
    """Of a server whose figures nobody asks for."""
    sample, came_at = CopySample(), {}

    @each
    def holders(page):
        return came_at[page] >= len(came_at) - 2_000, 1, False

    for number in range(100_000):
        came_at[key(number)] = number
        sample.published([key(number)], holders)
    assert 128 <= sample.look(holders).num_pages <= 512


def test_look_when_the_sample_has_many_pages_then_all_are_asked_for_at_once():
    sample, asked = CopySample(), []
    sample.published([key(number) for number in range(100)], one_pool)
    sample.look(lambda pages: asked.append(len(pages)) or one_pool(pages))
    assert asked == [100]
