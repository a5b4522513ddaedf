# SPDX-License-Identifier: Apache-2.0
"""The wheels in an environment that does not know the repository: SGLang as it was published, and Banyan beside it,
alone and with the distributions that are packed beside it.

The environment is fresh; what the wheel depends on is not copied into it but found where this environment has it, which
saves ten gigabytes. Whatever of Banyan is installed there is hidden by the wheel, and a test makes sure of that.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import urllib.request
import zipfile
from pathlib import Path

import pytest

from benchmark.modes import asking, models
from benchmark.servers import Server, ServerSpec, cpu_env, free_port, wait_answers, wait_ready

pytestmark = [pytest.mark.e2e, pytest.mark.further]
ROOT = Path(__file__).parents[2]
HERE = Path(sysconfig.get_path("purelib"))
FLAGS = ("--device", "cpu", "--max-total-tokens", "8000", "--sleep-on-idle", "--banyan-plan", "move")


class Installed:
    """An environment with the wheel in it, and an empty folder to run things in."""

    def __init__(self, folder: Path, *wheels: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.wheel = wheels[0]
        self.venv = folder / "venv"
        self.folder = folder / "elsewhere"
        self.folder.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.venv], check=True)
        self.bin = self.venv / "bin"
        site = self.venv / HERE.relative_to(HERE.parents[2])
        # A path in a .pth file is searched last, and the .pth files in it (Banyan's own is one) are not read.
        (site / "others.pth").write_text(f"{HERE}\n")
        uv = Path(sys.executable).parent / "uv"
        subprocess.run([uv, "pip", "install", "-q", "--no-deps", "--python", self.bin / "python", *wheels], check=True)

    def env(self):
        path = os.pathsep.join((str(self.bin), str(Path(sys.executable).parent), os.environ["PATH"]))
        return {name: text for name, text in os.environ.items() if name != "PYTHONPATH"} | {"PATH": path}

    def run(self, *words):
        return subprocess.run(
            words, cwd=self.folder, env=self.env(), capture_output=True, text=True, timeout=300, check=False
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheels by their names."""
    folder = tmp_path_factory.mktemp("wheel")
    # Against the glibc of this machine: what was compiled for the tests is used again.
    env = os.environ | {"WHEEL": "here"}
    subprocess.run([ROOT / "scripts/wheel.sh", folder], check=True, env=env, timeout=800)
    return {wheel.name.partition("-")[0]: wheel for wheel in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def alone_installed(built, tmp_path_factory):
    """Banyan without what is beside it."""
    return Installed(tmp_path_factory.mktemp("alone"), built["banyan"])


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("all"), built["banyan"], built["banyan_cpu_engine"], built["banyan_lab"])


def test_wheel_when_it_is_opened_then_it_is_for_every_python_and_holds_the_package_only(installed):
    assert re.fullmatch(r"banyan-[\d.]+-cp311-abi3-manylinux_\d+_\d+_\w+\.whl", installed.wheel.name)
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"banyan"}
    assert [name for name in names if "_native" in name and name.endswith(".so")] == ["banyan/_native.abi3.so"]
    assert sum(name.startswith("banyan/patches/") and name.endswith(".toml") for name in names) == len(
        list((ROOT / "python/banyan/patches").glob("*/*.toml"))
    )


def test_wheels_beside_it_when_they_are_opened_then_each_holds_its_package_and_what_that_reads(built):
    assert set(built) == {"banyan", "banyan_cpu_engine", "banyan_lab"}
    for name, folder, pattern in (
        ("banyan_cpu_engine", "cpu_engine", "patches/*/*.toml"),
        ("banyan_lab", "lab", "sim/data/*.toml"),
    ):
        names = zipfile.ZipFile(built[name]).namelist()
        assert {one.split("/")[0].split("-")[0] for one in names} == {name}
        packed = [one for one in names if one.endswith((".py", ".toml"))]
        source = ROOT / folder / name
        assert len(packed) == len([*source.rglob("*.py"), *source.glob(pattern)])


def test_laboratory_when_it_is_not_installed_then_one_line_says_how_to_have_it(alone_installed):
    done = alone_installed.run("banyan", "sim", "dp")
    assert done.returncode == 2 and done.stderr.startswith(
        "banyan sim: not installed: pip install build/dist/banyan_lab-*.whl"
    )


def test_server_when_no_cpu_engine_is_installed_then_its_dry_run_says_what_is_missing(alone_installed):
    model = models.ensure(models.LLAMA, ROOT / models.FOLDER)
    arguments = ("--model-path", str(model), "--device", "cpu", "--dp", "2", "--enable-banyan")
    done = alone_installed.run("banyan", "doctor", "--json", "--", *arguments)
    assert "no CPU engine" in done.stdout and "install banyan-cpu-engine" in done.stdout, done.stdout + done.stderr


def test_wheel_when_it_is_installed_then_python_finds_it_and_not_the_repository(installed):
    script = "import sys, banyan, banyan._native as n, sglang, json\n"
    script += "print(json.dumps([banyan.__file__, n.__file__, sglang.__file__, sys.path]))"
    done = installed.run("python", "-c", script)
    assert done.returncode == 0, done.stderr
    package, native, sglang, path = json.loads(done.stdout.splitlines()[-1])
    assert Path(package).is_relative_to(installed.venv) and Path(native).is_relative_to(installed.venv)
    assert Path(sglang).is_relative_to(HERE)
    assert not any(Path(one).resolve().is_relative_to(ROOT / "python") for one in path if one)


def test_commands_when_run_outside_the_repository_then_each_explains_itself(installed):
    listed = installed.run("banyan", "--help")
    assert listed.returncode == 0, listed.stderr
    commands = re.findall(r"^    ([a-z]+) ", listed.stdout, re.MULTILINE)
    assert {"doctor", "route", "explain", "store", "bench", "sim", "trace"} <= set(commands)
    for command in commands:
        done = installed.run("banyan", command, "--help")
        assert done.returncode == 0 and "usage:" in done.stdout, (command, done.stderr)


def test_doctor_when_run_outside_the_repository_then_the_installation_is_well(installed):
    done = installed.run("banyan", "doctor", "--json")
    found = {finding["what"]: finding for finding in json.loads(done.stdout)}
    for what in ("sglang", "patch queue", "entry point", "native core", "shared memory"):
        assert found[what]["is_ok"], found[what]


def test_server_when_started_with_the_wheel_then_a_rank_fetches_what_the_other_has_computed(
    installed, alone, tmp_path, monkeypatch
):
    for name, text in installed.env().items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(installed.folder)
    monkeypatch.setattr(sys, "executable", str(installed.bin / "python"))
    model = models.ensure(models.LLAMA, ROOT / models.FOLDER)
    with Server(ServerSpec("wheel", 2, "on", FLAGS, cpu_env(dp=2)), model, tmp_path) as server:
        wait_ready([server])
        ask = asking.tokens(server.url)
        (prompt,) = asking.prompts(1)
        computed, fetched = (ask(prompt, rank) for rank in (0, 1))
        assert fetched.said == computed.said
        assert fetched.cached["peer"] == (len(prompt) - 1) // 16 * 16
        shown = installed.run("banyan", "top", server.url, "--once", "--json")
        assert shown.returncode == 0 and json.loads(shown.stdout), shown.stderr
        looks_at_the_page(installed, server.url)


def looks_at_the_page(installed, url):
    """``banyan web`` in front of the server, until it has shown its page."""
    port = free_port()
    page = f"http://127.0.0.1:{port}/"
    web = subprocess.Popen(
        [installed.bin / "banyan", "web", url, "--port", str(port)], cwd=installed.folder, env=installed.env()
    )
    try:
        wait_answers(page, lambda: web.poll() is None, "banyan web does not answer", timeout_s=60)
        with urllib.request.urlopen(page, timeout=10) as response:
            assert "<html" in response.read().decode()
    finally:
        web.terminate()
        web.wait(20)
