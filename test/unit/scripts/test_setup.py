# SPDX-License-Identifier: Apache-2.0
"""``make setup`` in a checkout whose every tool stands in for one; nothing is installed."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
REAL = (
    *("bash", "cat", "cut", "dirname", "du", "env", "find", "grep", "mkdir", "rm", "sed", "sha256sum", "sleep"),
    *("sort", "uname", "wc"),
)
READ = (
    *(f"requirements/{name}" for name in ("cpu.lock", "store.txt", "alternatives.txt", "clients.txt", "ray.txt")),
    *("requirements/site.txt", "pyproject.toml", "sgl-kernel/Cargo.lock", "cpu_engine/pyproject.toml"),
    *("cpu_engine/sgl_kernel_cpu/pyproject.toml", "cpu_engine/sgl_kernel_cpu/sgl_kernel/mamba.py"),
    *("lab/pyproject.toml", "build/models/smollm2-135m-instruct/banyan-model.json"),
)
STAND_INS = {
    "bin/python3.11": "",
    "bin/cc": "",
    "bin/c++": "cat >/dev/null",
    "bin/cargo": "",
    "bin/rustc": "echo rustc 9.9.9",
    "bin/id": "echo 1000",
    "bin/chromium": "",
    "bin/promtool": "",
    "bin/ldconfig": 'cat "$(dirname "$0")/libraries"',
    ".venv/bin/python": "",
    ".venv/bin/uv": 'echo "$@" >>"$(dirname "$0")/installed"',
}


class Checkout:
    """Where ``make setup`` finds the tools of ``bin`` and no others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("bin", ".venv/bin", "scripts", "sgl-kernel/crates"):
            (folder / name).mkdir(parents=True)
        for name in ("scripts/setup.sh", "sgl-kernel/Cargo.toml"):
            shutil.copy(ROOT / name, folder / name)
        for name in READ:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        for name in REAL:
            (folder / "bin" / name).symlink_to(shutil.which(name))
        for name, body in STAND_INS.items():
            self.stand_in(name, body)
        self.libraries("libibverbs.so.1")

    def stand_in(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def libraries(self, *names: str) -> None:
        """What the linker finds."""
        lines = [f"\t{name} (libc6,x86-64) => /lib/{name}\n" for name in names]
        (self.folder / "bin/libraries").write_text("".join(lines))

    def installed(self) -> str:
        log = self.folder / ".venv/bin/installed"
        return log.read_text() if log.exists() else ""

    def start(self) -> "subprocess.Popen[str]":
        # Whoever runs the tests may have told them to ignore Ctrl-C.
        command = ["env", "--default-signal=INT", str(self.folder / "scripts/setup.sh")]
        return subprocess.Popen(
            command,
            env={"PATH": str(self.folder / "bin")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self) -> tuple[int, str]:
        setup = self.start()
        said, _ = setup.communicate(timeout=60)
        return setup.returncode, said


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_setup_when_all_is_there_then_it_is_ready_and_the_second_time_installs_nothing(checkout: Checkout) -> None:
    assert checkout.run()[0] == 0
    installed = checkout.installed()
    assert "requirements/cpu.lock" in installed and "sgl_kernel_cpu" in installed
    (checkout.folder / "python/banyan").mkdir(parents=True)
    (checkout.folder / "python/banyan/_native.abi3.so").touch()
    assert checkout.run() == (0, "[setup] ready\n")
    assert checkout.installed() == installed


def test_setup_when_the_processor_is_another_then_it_says_so(checkout: Checkout) -> None:
    (checkout.folder / "bin/uname").unlink()
    checkout.stand_in("bin/uname", 'test "$1" = -m && echo aarch64 || echo Linux')
    assert checkout.run() == (1, "setup: missing: an x86-64 processor, and this is aarch64;\n")


def test_setup_when_there_is_no_rust_then_it_says_so(checkout: Checkout) -> None:
    (checkout.folder / "bin/rustc").unlink()
    status, said = checkout.run()
    assert status == 1 and "or later, found none (rustup.rs" in said


def test_setup_when_there_is_a_cuda_driver_among_many_libraries_then_nothing_stands_in_for_the_kernels(
    checkout,
) -> None:
    """Many: more than a pipe holds when who reads has gone."""
    checkout.libraries("libcuda.so.1", "libibverbs.so.1", *["libother.so.1"] * 4000)
    status, said = checkout.run()
    assert status == 0 and "not here" not in said
    assert "sgl_kernel_cpu" not in checkout.installed()


@pytest.mark.parametrize(
    ("tool", "body"),
    [(".venv/bin/uv", "exec sleep 60"), ("bin/apt-get", "trap 'exit 1' INT; sleep 60")],
    ids=["the step dies", "a step fails that may"],
)
def test_setup_when_ctrl_c_ends_it_then_its_step_ends_too_and_no_other_begins(
    checkout: Checkout, tool: str, body: str
) -> None:
    checkout.libraries()
    checkout.stand_in("bin/id", "echo 0")
    checkout.stand_in(tool, f'echo $$ >"$(dirname "$0")/step"; {body}')
    number = (checkout.folder / tool).with_name("step")
    setup = checkout.start()
    deadline_s = time.monotonic() + 30
    while not (number.exists() and number.read_text().strip()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    os.killpg(setup.pid, signal.SIGINT)
    said, _ = setup.communicate(timeout=30)
    assert setup.returncode != 0 and "documentation site" not in said
    assert not Path("/proc", number.read_text().strip()).exists()


def test_setup_when_a_package_cannot_be_installed_then_others_are_and_it_is_tried_once(checkout: Checkout) -> None:
    checkout.libraries()
    (checkout.folder / "bin/chromium").unlink()
    checkout.stand_in("bin/id", "echo 0")
    here = 'cd "$(dirname "$0")"; echo "$@" >>asked'
    checkout.stand_in(
        "bin/apt-get", f'{here}; case "$*" in *chromium*) exit 1 ;; *lib*) echo libibverbs.so.1 >libraries; esac'
    )
    assert "installing chromium fonts-dejavu-core (for tests only) ...\n[setup]     failed" in checkout.run()[1]
    asked = (checkout.folder / "bin/asked").read_text()
    assert checkout.run()[0] == 0
    assert (checkout.folder / "bin/asked").read_text() == asked and asked.count("install ") == 2
