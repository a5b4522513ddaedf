# SPDX-License-Identifier: Apache-2.0
import pytest
import zmq

from banyan.owner import read_secret
from banyan.transport.sealed.secret import Keys


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef\n")
    path.chmod(0o600)
    return path


def test_secret_when_the_file_is_private_then_it_is_read_without_the_newline(path):
    assert read_secret(path) == b"0123456789abcdef"


def test_secret_when_it_lies_as_a_kubelet_mounts_one_then_it_is_read_through_the_links(path, tmp_path):
    """A Secret's files are links, so that all of them change at once; the chart mounts them with mode 0400."""
    (tmp_path / "..now").mkdir()
    path.chmod(0o400)
    path.rename(tmp_path / "..now" / "secret")
    (tmp_path / "..data").symlink_to("..now")
    path.symlink_to("..data/secret")
    assert read_secret(path) == b"0123456789abcdef"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_secret_when_others_may_open_it_then_refused_with_the_way_out(path, mode):
    path.chmod(mode)
    with pytest.raises(ValueError, match="chmod 600"):
        read_secret(path)


def test_secret_when_it_is_too_short_or_missing_then_refused(path):
    path.write_bytes(b"short\n")
    with pytest.raises(ValueError, match="openssl rand"):
        read_secret(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_secret(path)


def test_keys_when_made_of_a_secret_then_the_same_everywhere_and_of_another_all_different():
    one, same, other = Keys.of(b"a" * 16), Keys.of(b"a" * 16), Keys.of(b"b" * 16)
    assert one == same
    pairs = [one.page_server, one.borrower, other.page_server, other.borrower]
    assert len({pair.public for pair in pairs}) == len({pair.secret for pair in pairs}) == 4
    assert zmq.curve_public(one.page_server.secret) == one.page_server.public
