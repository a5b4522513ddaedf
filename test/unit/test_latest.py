# SPDX-License-Identifier: Apache-2.0
from banyan.latest import Latest


def test_put_when_there_are_too_many_then_the_oldest_goes_and_what_was_put_again_is_not_old():
    latest: Latest[str, int] = Latest(2)
    latest.put("a", 1)
    latest.put("b", 2)
    latest.put("a", 3)
    latest.put("c", 4)
    assert list(latest.items()) == [("a", 3), ("c", 4)]


def test_put_when_there_may_be_fewer_than_before_then_all_that_is_too_much_goes():
    latest: Latest[int, None] = Latest(5)
    for number in range(5):
        latest.put(number, None)
    latest.most = 2
    latest.put(5, None)
    assert list(latest) == [4, 5]


def test_used_when_nothing_is_there_then_made_once_and_the_latest_each_time():
    latest: Latest[str, list[int]] = Latest(2)
    latest.used("a", list).append(1)
    latest.used("b", list)
    latest.used("a", list).append(2)
    latest.used("c", list)
    assert list(latest.items()) == [("a", [1, 2]), ("c", [])]
