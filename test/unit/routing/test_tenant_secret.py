# SPDX-License-Identifier: Apache-2.0
"""A tenant's salt is its own whatever its clients say, and only who knows the secret says whose a request is."""

from hypothesis import given
from hypothesis import strategies as st

from banyan.routing.tenant_secret import SALT_CHARS, TenantSecret, salted

ONE, OTHER = TenantSecret(b"a" * 32), TenantSecret(b"b" * 32)


def test_word_when_said_with_the_secret_then_its_salt_is_heard_and_with_another_not():
    salt = ONE.salt_of("tenant", "acme")
    assert ONE.heard(ONE.word(salt)) == salt
    assert ONE.heard(OTHER.word(salt)) is None
    assert ONE.name != OTHER.name


@given(st.text())
def test_word_when_it_is_anything_then_it_is_not_heard(word):
    assert ONE.heard(word) is None
    assert ONE.heard(ONE.salt_of("tenant", "acme") + word) is None


def test_salt_when_of_another_kind_or_name_then_another():
    made = {ONE.salt_of(kind, name) for kind in ("tenant", "common") for name in ("a", "b", "")}
    assert len(made) == 6 and {len(salt) for salt in made} == {SALT_CHARS}
    assert ONE.name not in made


@given(st.text(), st.text())
def test_salts_when_clients_of_two_tenants_say_anything_then_they_differ(said, said_there):
    mine, theirs = ONE.salt_of("tenant", "a"), ONE.salt_of("tenant", "b")
    assert salted(mine, said) != salted(theirs, said_there)
    assert salted(mine, said).startswith(mine)


@given(st.text())
def test_salt_when_salted_again_then_it_stays(said):
    mine = ONE.salt_of("tenant", "a")
    assert salted(mine, salted(mine, said)) == salted(mine, said)
    assert salted(mine, None) == salted(mine, "") == mine
