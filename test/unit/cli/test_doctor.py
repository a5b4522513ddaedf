# SPDX-License-Identifier: Apache-2.0
"""What ``banyan doctor`` says of the installation: for each thing that can be amiss, the way out."""

import errno
import importlib.metadata
import importlib.util
from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest

from banyan import SGLANG_VERSION, _native, config, patches
from banyan.cli import doctor


def versions(monkeypatch, found):
    def version(name):
        if found.get(name) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)


@pytest.mark.parametrize(
    ("found", "way_out"),
    [
        (None, f"pip install sglang=={SGLANG_VERSION}"),
        ("0.5.22", f"sglang=={SGLANG_VERSION} only"),
        (SGLANG_VERSION, None),
        (f"{SGLANG_VERSION}+cu130", None),
    ],
)
def test_sglang_when_it_is_another_release_or_missing_then_which_one_to_install(monkeypatch, found, way_out):
    versions(monkeypatch, {"sglang": found})
    finding = doctor._versions()
    assert finding.is_ok == (way_out is None) and (way_out or "") in finding.advice


@pytest.mark.parametrize(
    "listed", [None, [], ["banyan/there", "banyan/gone.pyc", "../../bin/gone"], ["banyan/there", "banyan/gone.toml"]]
)
def test_wheel_when_a_file_of_it_is_gone_then_it_is_named_and_the_way_out(monkeypatch, tmp_path, listed):
    (tmp_path / "banyan").mkdir()
    (tmp_path / "banyan" / "there").touch()

    class File(PurePosixPath):
        def locate(self):
            return tmp_path / self

    monkeypatch.setattr(doctor.importlib.metadata, "files", lambda name: listed and list(map(File, listed)))
    finding = doctor._wheel()
    assert finding.is_ok == ("banyan/gone.toml" not in (listed or ()))
    assert finding.is_ok or (
        "1 of 2 files are gone: banyan/gone.toml" in finding.detail and "wheel anew" in finding.advice
    )


def test_patches_when_one_is_not_installed_then_the_way_out(monkeypatch):
    monkeypatch.setattr(patches, "NUM_PATCHES", patches.NUM_PATCHES + 1)
    finding = doctor._seams()
    assert not finding.is_ok and "install Banyan's wheel anew" in finding.advice


@pytest.mark.parametrize(("feature", "said"), [("victims", "SGLang evicts by age"), ("core", "Banyan is off")])
def test_patches_when_the_source_has_changed_then_what_is_off_and_the_way_out(monkeypatch, feature, said):
    patch = next(patch for patch in patches.load_queue() if patch.feature == feature)
    misfit = patches.Misfit(patch, patch.places[0], "it has changed")
    monkeypatch.setattr(doctor.patches, "changed", lambda queue: [misfit])
    finding = doctor._seams()
    assert not finding.is_ok and patch.name in finding.detail and said in finding.detail
    assert f"install sglang=={SGLANG_VERSION}" in finding.advice


def test_patches_when_what_sglang_asks_for_has_changed_then_that_is_to_be_installed_and_not_sglang(monkeypatch):
    (patch,) = [patch for patch in patches.load_queue() if patch.places[0].package == "smg_grpc_servicer"]
    monkeypatch.setattr(doctor.patches, "changed", lambda queue: [patches.Misfit(patch, patch.places[0], "changed")])
    advice = doctor._seams().advice
    assert advice == f"install smg_grpc_servicer=={importlib.metadata.version('smg_grpc_servicer')} as it was published"


@pytest.mark.parametrize(
    ("names", "allowed", "is_ok"),
    [(["banyan"], None, True), ([], None, False), (["banyan"], ["other"], False), (["banyan"], ["banyan"], True)],
)
def test_entry_point_when_sglang_would_not_load_it_then_the_way_out(monkeypatch, names, allowed, is_ok):
    entries = [SimpleNamespace(name=name) for name in names]
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: entries)
    monkeypatch.setattr(config, "allowed_plugins", lambda: allowed)
    finding = doctor._entry_point()
    assert finding.is_ok == is_ok and "SGLANG_PLUGINS" in finding.advice


def test_shared_memory_when_it_is_forbidden_then_the_way_out(monkeypatch):
    assert doctor._shared_memory().is_ok

    class Forbidden:
        @staticmethod
        def create(num_slots):
            raise PermissionError(errno.EPERM, "memfd_create")

    monkeypatch.setattr(_native, "RankTable", Forbidden)
    finding = doctor._shared_memory()
    assert not finding.is_ok and "memfd_create" in finding.advice


@pytest.mark.parametrize(("setting", "is_noted"), [("always", False), ("advise", False), ("never", True)])
def test_huge_pages_when_shared_memory_has_none_then_how_to_turn_them_on(monkeypatch, setting, is_noted):
    monkeypatch.setattr(doctor, "shared_memory_huge_pages", lambda: setting)
    finding = doctor._huge_pages()
    assert finding.is_ok and ("shmem_enabled" in finding.hint) == is_noted


def test_kept_arena_when_it_holds_memory_then_how_to_have_it_back(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "KEEP_FOLDER", str(tmp_path))
    assert not doctor._kept_arena().hint
    (tmp_path / "arena").mkdir()
    (tmp_path / "arena" / "part-0").write_bytes(b"x" * 8192)
    (tmp_path / "arena" / "part-1").symlink_to("nowhere")
    assert "remove the folder" in doctor._kept_arena().hint


@pytest.mark.parametrize(
    ("is_there", "stand_in", "said"),
    [(False, None, "not installed"), (True, "0.2.0", "CPU stand-in 0.2.0"), (True, None, "SGLang's own")],
)
def test_sgl_kernel_when_it_is_missing_then_the_way_out_and_else_which_it_is(monkeypatch, is_there, stand_in, said):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object() if is_there else None)
    versions(monkeypatch, {"banyan-sgl-kernel-cpu": stand_in})
    finding = doctor._sgl_kernel()
    assert said in finding.detail and finding.is_ok == is_there
    assert is_there or "make setup" in finding.advice


@pytest.mark.parametrize("version", [None, "0.1.0"])
def test_cpu_engine_when_it_is_missing_then_who_needs_it(monkeypatch, version):
    versions(monkeypatch, {"banyan-cpu-engine": version})
    finding = doctor._cpu_engine()
    assert finding.is_ok and ("install banyan-cpu-engine" in finding.hint) is (version is None)


def test_store_when_its_name_cannot_be_read_then_where_it_is_explained():
    finding = doctor.examine(store=("tape://x",))[-1]
    assert (finding.what, finding.is_ok) == ("store", False) and "docs/operations.md" in finding.advice


def test_doctor_when_it_looks_around_then_every_finding_has_a_name_of_its_own():
    names = [finding.what for finding in doctor.examine()]
    assert len(set(names)) == len(names) >= 20
