# SPDX-License-Identifier: Apache-2.0
import socket

from banyan.cli import main
from banyan.cli.doctor import examine_store
from banyan.store.location import StoreLocation


def test_store_when_nobody_answers_then_bad_with_the_command_that_helps():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (found,) = examine_store(StoreLocation.parse((f"mooncake://127.0.0.1:{port}",)))
    assert not found.is_ok and "no Mooncake master answers" in found.detail
    assert found.advice.startswith("start one with `mooncake_master") and found.what.endswith(str(port))


def test_store_when_nobody_has_its_scheme_then_bad_with_the_schemes_that_there_are():
    (found,) = examine_store(StoreLocation.parse(("s3:///x",)))
    assert not found.is_ok and found.advice.startswith("use one of 3fs, file")


def test_store_when_its_library_is_there_then_well_and_of_files_nothing():
    (found,) = examine_store(StoreLocation.parse(("nixl+posix:///kv",)))
    assert found.is_ok and not found.hint
    assert examine_store(StoreLocation.parse(("/kv",))) == []


def test_doctor_when_a_store_is_named_then_its_library_and_its_drives(tmp_path, capsys):
    main(["doctor", "--store", f"nixl+posix://{tmp_path},{tmp_path}"])
    said = capsys.readouterr().out
    assert f"store on nixl+posix://{tmp_path}" in said and said.count(f"drive of {tmp_path}:") == 2


def test_doctor_when_the_folder_of_a_store_is_not_there_yet_then_nothing_is_bad_about_it(tmp_path, capsys):
    main(["doctor", "--store", str(tmp_path / "kv")])
    said = [line for line in capsys.readouterr().out.splitlines() if str(tmp_path) in line]
    assert len(said) == 3 and not any(line.startswith("BAD") for line in said)


def test_doctor_when_a_store_is_refused_then_its_drives_are_not_looked_at(tmp_path, capsys):
    main(["doctor", "--store", f"s3://{tmp_path}"])
    said = capsys.readouterr().out
    assert f"BAD  store on s3://{tmp_path}" in said and "drive of" not in said


def test_doctor_when_the_url_is_none_then_said_so(capsys):
    assert main(["doctor", "--store", "nixl:GDS"]) != 0
    assert "POSIX is served" in capsys.readouterr().out
