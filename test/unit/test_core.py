# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.core import Address


@pytest.mark.parametrize("text", ["node-1:7", "10.0.0.1:65000", "[::1]:7", "[fe80::1%eth0]:7"])
def test_address_when_it_is_one_then_it_is_written_as_it_was_read(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "a", ":7", "a:", "a:0", "a:65535", "a:-1", "a:\u0661", "::1:7", "[a:7", "[[a]]:7", "a b:7", "a" * 256 + ":7"],
)
def test_address_when_it_is_none_then_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no HOST:PORT"):
        Address.parse(text)
