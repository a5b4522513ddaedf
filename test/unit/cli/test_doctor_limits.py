# SPDX-License-Identifier: Apache-2.0
import errno
import resource
import socket

import pytest

from banyan.cli import doctor_limits
from banyan.cli.doctor_limits import examine_limits
from banyan.cli.doctor_machine import Kernel


def limited(which, limit):
    return lambda asked: (limit, limit) if asked == which else (resource.RLIM_INFINITY,) * 2


LIMITS = {
    "locked_memory": (resource.RLIMIT_MEMLOCK, 65536, "ulimit -l unlimited"),
    "open_files": (resource.RLIMIT_NOFILE, 1024, "ulimit -n 4096"),
    "processes": (resource.RLIMIT_NPROC, 100, "ulimit -u 4096"),
    "file_size": (resource.RLIMIT_FSIZE, 1 << 20, "ulimit -f unlimited"),
    "address_space": (resource.RLIMIT_AS, 1 << 30, "ulimit -v unlimited"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limit_when_it_is_low_then_the_finding_says_how_to_raise_it_and_else_is_well(name):
    which, low, way_out = LIMITS[name]
    look = getattr(doctor_limits, name)
    assert way_out in str(look(limited(which, low)))
    assert str(look(limited(which, resource.RLIM_INFINITY))).startswith("ok ")


def test_limits_when_they_are_those_of_sharing_itself_then_bad():
    for name in ("file_size", "address_space"):
        which, low, _ = LIMITS[name]
        assert not getattr(doctor_limits, name)(limited(which, low)).is_ok


def test_shm_when_it_is_small_or_missing_then_the_way_out(monkeypatch, tmp_path):
    usage = doctor_limits.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor_limits.shutil, "disk_usage", lambda folder: usage._replace(total=64 << 20, free=1 << 20))
    assert "--shm-size" in doctor_limits.shm_folder(tmp_path).hint
    monkeypatch.undo()
    missing = doctor_limits.shm_folder(tmp_path / "missing")
    assert not missing.is_ok and "tmpfs" in missing.advice


def test_memory_of_another_process_when_it_may_be_opened_then_well_and_else_the_way_out():
    assert doctor_limits.foreign_files(doctor_limits._open_of_a_child).is_ok

    def refuse():
        raise PermissionError(errno.EACCES, "no")

    finding = doctor_limits.foreign_files(refuse)
    assert not finding.is_ok and "hidepid" in finding.advice and "--banyan-share off" in finding.advice


@pytest.mark.parametrize(("scope", "said"), [("", "ok "), ("0", "ok "), ("1", "ok "), ("2", "py-spy"), ("3", "py-spy")])
def test_ptrace_when_it_is_restricted_then_it_is_said_who_suffers(tmp_path, scope, said):
    path = tmp_path / "proc/sys/kernel/yama/ptrace_scope"
    path.parent.mkdir(parents=True)
    path.write_text(scope)
    finding = doctor_limits.ptrace_scope(Kernel(tmp_path))
    assert finding.is_ok and said in str(finding)


@pytest.mark.parametrize(
    ("number", "disabled", "said"),
    [
        (0, "0", "ok "),
        (errno.EPERM, "2", "io_uring_disabled=0"),
        (errno.EPERM, "0", "seccomp"),
        (errno.ENOSYS, "", "threads"),
    ],
)
def test_io_uring_when_it_is_refused_then_who_refuses_it_and_what_the_store_does(tmp_path, number, disabled, said):
    path = tmp_path / "proc/sys/kernel/io_uring_disabled"
    path.parent.mkdir(parents=True)
    path.write_text(disabled)
    assert said in str(doctor_limits.io_uring(Kernel(tmp_path), lambda: number))


def test_port_when_somebody_listens_there_then_a_note():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert "--port" in doctor_limits.port("port", number).hint
    assert not doctor_limits.port("port", number).hint


@pytest.mark.parametrize("number", [70_000, -1])
def test_port_when_there_is_none_of_that_number_then_bad_and_the_way_out(number):
    finding = doctor_limits.port("port", number)
    assert not finding.is_ok and str(number) in finding.detail and "--port" in finding.advice


@pytest.mark.parametrize(("low", "said"), [("32768", "ok "), ("1024", "ip_local_port_range")])
def test_port_range_when_connections_may_take_the_server_s_then_a_note(tmp_path, low, said):
    path = tmp_path / "proc/sys/net/ipv4/ip_local_port_range"
    path.parent.mkdir(parents=True)
    path.write_text(f"{low}\t60999\n")
    assert said in str(doctor_limits.port_range(Kernel(tmp_path)))


def test_compiler_when_it_is_missing_then_what_to_install(monkeypatch):
    finding = doctor_limits.compiler(lambda: ["c++"])
    assert not finding.is_ok and "libssl-dev" in finding.advice
    monkeypatch.setattr(doctor_limits.shutil, "which", lambda name: None)
    assert doctor_limits.host_obstacles() == ["c++"]


def test_limits_when_looked_at_here_then_each_has_a_name_of_its_own():
    names = [finding.what for finding in examine_limits(Kernel())]
    assert len(names) == len(set(names)) == 13
