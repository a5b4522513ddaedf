# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

from test.unit.features.nodes.test_remote_leases import Clock

from banyan.features.nodes.questions import (
    FIRST_BEHIND_S,
    FIRST_PROBE_S,
    LAST_BEHIND_S,
    LAST_PROBE_S,
    MOST_READ_S,
    PATIENCE_S,
    SILENCE_S,
    Best,
    Questions,
)

ALL = range(3)


def listening(num_nodes):
    clock = Clock()
    asking = Questions(num_nodes, clock)
    for node in range(num_nodes):
        asking.heard(node)
    return asking, clock


def test_question_when_all_have_answered_then_the_best_node_is_named():
    asking, _ = listening(3)
    assert asking.begin(1, ALL) == [0, 1, 2]
    assert asking.answered(1, 0, 4) is None and asking.answered(1, 1, 9) is None
    assert asking.answered(1, 1, 99) is None, "one answer counts once"
    assert asking.answered(1, 2, 7) == Best(1, 1, 9, ((2, 7), (0, 4)))
    assert asking.answered(1, 2, 7) is None and asking.expire() == []


def test_question_when_nodes_have_equally_much_then_the_one_with_the_fewest_pulls_under_way_is_named():
    asking, _ = listening(3)
    asking.begin(1, ALL)
    for node, (num_pages, num_pulls) in enumerate([(9, 1), (9, 0), (9, 2)]):
        best = asking.answered(1, node, num_pages, num_pulls)
    assert best == Best(1, 1, 9, ((0, 9), (2, 9)))
    asking.begin(2, ALL)
    for node, (num_pages, num_pulls) in enumerate([(8, 0), (9, 5), (0, 0)]):
        best = asking.answered(2, node, num_pages, num_pulls)
    assert best == Best(2, 1, 9, ((0, 8),)), "more pages count first, and who has none is not among them"


def test_question_when_nobody_has_a_page_then_no_node_is_named():
    asking, _ = listening(1)
    asking.begin(1, ALL)
    assert asking.answered(1, 0, 0) == Best(1, -1, 0)


def test_question_when_a_node_does_not_answer_then_it_ends_in_time_and_the_node_is_not_asked_again():
    asking, clock = listening(2)
    asking.begin(1, ALL)
    asking.answered(1, 1, 5)
    assert asking.expire() == []
    clock.now_s = PATIENCE_S
    assert asking.expire() == [Best(1, 1, 5)]
    assert asking.begin(2, ALL) == [1] and asking.listening == [1]
    asking.heard(0)
    assert asking.begin(3, ALL) == [0, 1]


def test_question_when_its_answer_comes_late_then_the_next_request_does_not_wait_for_that_node():
    asking, clock = listening(1)
    for number in range(1, 4):
        waited = asking.begin(number, ALL)
        assert bool(waited) == (number == 1)
        clock.now_s += PATIENCE_S
        asking.expire()
        clock.now_s += PATIENCE_S / 5
        assert asking.answered(number, 0, 5) is None and asking.listening == []


def test_silent_node_when_it_answers_probes_late_then_it_stays_silent_and_in_time_it_listens():
    asking, clock = listening(1)
    asking.silent(0)
    late = []
    for _ in range(2_000):
        clock.now_s += 0.01
        late += [(clock.now_s + PATIENCE_S + 0.1, node, number) for node, number in asking.to_probe()]
        while late and late[0][0] <= clock.now_s:
            _, node, number = late.pop(0)
            asking.answered(number, node, 0)
            assert asking.listening == []
    clock.now_s += LAST_PROBE_S
    ((node, number),) = asking.to_probe()
    asking.answered(number, node, 0)
    assert asking.listening == [0]


def test_question_when_it_cannot_be_put_to_the_last_node_then_it_is_over():
    asking, _ = listening(2)
    asking.begin(1, ALL)
    assert asking.answered(1, 0, 3) is None
    assert asking.missed(1, 1) == Best(1, 0, 3)
    assert asking.missed(7, 0) is None and asking.listening == []
    assert asking.begin(2, ALL) == []


def test_silent_node_when_it_stays_silent_then_it_is_probed_ever_more_seldom():
    clock = Clock()
    asking = Questions(1, clock)
    times = []
    while clock.now_s < 60:
        times += [clock.now_s] * len(asking.to_probe())
        clock.now_s += 0.01
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0 and abs(gaps[0] - FIRST_PROBE_S) < 0.02 and abs(gaps[-1] - LAST_PROBE_S) < 0.02
    assert len(times) < 20
    asking.heard(0)
    assert asking.to_probe() == []


def test_silent_node_when_somebody_is_reached_there_then_it_is_probed_at_once():
    asking, clock = listening(1)
    asking.connected(0)
    assert asking.listening == [0], "who listens goes on listening"
    asking.silent(0)
    assert asking.to_probe() == []
    asking.connected(0)
    assert [node for node, _ in asking.to_probe()] == [0] and asking.to_probe() == []
    clock.now_s = FIRST_PROBE_S
    assert [node for node, _ in asking.to_probe()] == [0]


def test_node_when_it_rests_then_it_is_not_asked_and_no_answer_ends_that():
    resting = {0}
    asking = Questions(2, Clock(), resting.__contains__)
    ((_, probe), _) = asking.to_probe()
    asking.answered(probe, 0, 0)
    asking.heard(1)
    assert asking.listening == [1] and asking.begin(1, ALL) == [1]
    resting.clear()
    assert asking.begin(2, ALL) == [0, 1]


def asked(asking, *num_pages):
    """How a question ends when each node says that it has so many."""
    asking.begin(1, ALL)
    for node, num in enumerate(num_pages):
        best = asking.answered(1, node, num)
    return best


def test_node_when_it_promises_most_and_refuses_each_loan_then_ever_more_seldom_it_is_named():
    asking, clock = listening(3)
    refused_s = []
    while clock.now_s < 400:
        best = asked(asking, 99, 9, 8)
        if best.node == 0:
            refused_s.append(clock.now_s)
            asking.refused(0)
        else:
            assert best == Best(1, 1, 9, ((2, 8),))
        clock.now_s += 0.5
    gaps = [later - earlier for earlier, later in pairwise(refused_s)]
    assert gaps == [1, 2, 4, 8, 16, 32, *[LAST_BEHIND_S] * 5]


def test_node_when_it_refuses_pulls_of_one_moment_then_once_counts_and_one_that_lands_ends_it():
    asking, clock = listening(2)
    for _ in range(2):
        for _ in range(5):
            asking.refused(0)
        assert asked(asking, 9, 3).node == 1
        clock.now_s += FIRST_BEHIND_S
        assert asked(asking, 9, 3) == Best(1, 0, 9, ((1, 3),))
        asking.refused(0)
        asking.brought(0)
        assert asked(asking, 9, 3).node == 0


def test_node_when_it_has_refused_and_nobody_else_has_pages_then_it_is_named_all_the_same():
    asking, _ = listening(2)
    asking.refused(0)
    assert asked(asking, 9, 0) == Best(1, 0, 9)
    asking.refused(1)
    assert asked(asking, 9, 3) == Best(1, 0, 9, ((1, 3),)), "all have refused"
    assert asked(asking, 0, 0) == Best(1, -1, 0)


def test_question_when_it_is_for_some_then_only_those_of_them_that_listen_are_asked():
    asking, _ = listening(3)
    assert asking.begin(1, [1]) == [1]
    assert asking.answered(1, 0, 9) is None, "nobody has asked it"
    assert asking.answered(1, 1, 2) == Best(1, 1, 2)
    asking.silent(1)
    assert asking.begin(2, [1]) == [] and asking.begin(3, [1, 2]) == [2]


def test_remote_prefetch_when_its_node_falls_silent_then_it_is_over_soon_and_the_node_is_not_asked_again():
    asking, clock = listening(2)
    asking.begin(1, [1])
    clock.now_s += 0.9 * PATIENCE_S
    asking.reads_on(1, 1)
    asking.reads_on(1, 0)
    clock.now_s += 0.9 * SILENCE_S
    assert asking.expire() == []
    clock.now_s += 0.2 * SILENCE_S
    assert asking.expire() == [Best(1, -1, 0)] and asking.listening == [0]
    asking.reads_on(1, 1)
    assert asking.expire() == []


def test_remote_prefetch_when_another_node_says_that_it_reads_then_that_is_none():
    asking, clock = listening(2)
    asking.begin(1, [1])
    asking.reads_on(1, 0)
    clock.now_s += PATIENCE_S
    assert asking.expire() == [Best(1, -1, 0)]


def test_remote_prefetch_when_its_node_is_alive_and_slow_then_it_is_over_after_a_while_and_the_node_is_asked_again():
    asking, clock = listening(1)
    asking.begin(1, ALL)
    for _ in range(round(MOST_READ_S)):
        asking.reads_on(1, 0)
        assert asking.expire() == []
        clock.now_s += 1
    assert asking.expire() == [Best(1, -1, 0)] and asking.listening == [0]


def test_node_when_it_has_brought_pages_and_answers_late_then_it_stays_silent():
    asking, clock = listening(1)
    asking.begin(1, ALL)
    clock.now_s += PATIENCE_S + 0.1
    asking.reads_on(1, 0)
    asking.silent(0)
    assert asking.answered(1, 0, 3) == Best(1, 0, 3) and asking.listening == []
