# SPDX-License-Identifier: Apache-2.0
from banyan.features.pairs.unanswered import MAX_SERVERS, SLOW_S, Unanswered


class Servers:
    """One that answers after ``took_s``."""

    def __init__(self):
        self.now_s, self.took_s, self.says, self.num_asked = 1000.0, 0.0, False, 0
        self.unanswered = Unanswered(lambda: self.now_s)

    def answer(self):
        self.num_asked += 1
        self.now_s += self.took_s
        return self.says

    def ask(self, server="stopped"):
        return self.unanswered.ask(server, self.answer, False)


def test_server_when_it_is_stopped_then_no_more_than_a_tenth_of_the_time_goes_into_asking_it():
    servers = Servers()
    servers.took_s, begun_s = 5.0, servers.now_s
    while servers.now_s < begun_s + 1000:
        assert servers.ask() is False
        servers.now_s += 0.01
    assert servers.num_asked * servers.took_s <= 100
    servers.ask("another")
    assert servers.num_asked == 20


def test_server_when_it_goes_on_then_it_is_asked_again():
    servers = Servers()
    servers.took_s = 5.0
    servers.ask()
    servers.took_s, servers.says = 0.001, True
    servers.now_s += 49
    assert servers.ask() is False
    servers.now_s += 2
    assert servers.ask() is True


def test_server_when_it_brings_something_or_says_no_at_once_then_it_is_asked_each_time():
    servers = Servers()
    for servers.says, servers.took_s in ((True, 5.0), (False, SLOW_S / 2)):
        for _ in range(5):
            servers.ask()
    assert servers.num_asked == 10


def test_servers_when_many_are_slow_then_the_first_are_forgotten():
    servers = Servers()
    servers.took_s = 3.0
    for number in range(2 * MAX_SERVERS):
        servers.ask(str(number))
    assert len(servers.unanswered._until_s) == MAX_SERVERS
