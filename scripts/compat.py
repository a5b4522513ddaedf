# SPDX-License-Identifier: Apache-2.0
"""What another release of SGLang changes under Banyan: ``make compat SGLANG=x.y.z``.

The release's wheel is fetched without what it depends on and read, not installed. Exit status: 0 when every patch fits,
1 when some have changed, 2 when the release cannot be had.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from banyan import SGLANG_VERSION, patches


def fetch(release: str, folder: Path) -> Path:
    """The wheel of a release, in ``folder``. Raises CalledProcessError when the package index has none."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", folder, f"sglang=={release}"],
        check=True,
        capture_output=True,
        text=True,
    )
    (wheel,) = folder.glob("sglang-*.whl")
    return wheel


def drift(wheel: Path, folder: Path, queue: list[patches.Patch]) -> list[str]:
    """A line for each patch that does not fit the source in ``wheel``."""
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder, [name for name in opened.namelist() if name.endswith(".py")])
    return patches.changed(queue, folder)


def main(argv: list[str], *, fetched: Callable[[str, Path], Path] = fetch) -> int:
    parser = argparse.ArgumentParser(prog="make compat", description=__doc__)
    parser.add_argument("release", metavar="SGLANG")
    release = parser.parse_args(argv).release
    queue = patches.load_queue()
    with tempfile.TemporaryDirectory() as folder:
        print(f"fetching sglang {release} ...", flush=True)
        try:
            wheel = fetched(release, Path(folder))
        except subprocess.CalledProcessError as error:
            print(f"compat: sglang {release} cannot be had: {error.stderr.strip()[-500:]}", file=sys.stderr)
            return 2
        lines = drift(wheel, Path(folder), queue)
    for line in lines:
        print(line)
    print(f"sglang {release}: {len(queue) - len(lines)} of {len(queue)} patches of {SGLANG_VERSION} fit")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
