# SPDX-License-Identifier: Apache-2.0
"""What another release of SGLang changes under Banyan, feature by feature: ``make compat SGLANG=x.y.z``.

The release's wheel is fetched without what it depends on and read, not installed. For each feature one line says that
it fits, or which hooks are to be read again, each beside the upstream change. Exit status: 0 when every patch fits, 1
when some do not, 2 when the release cannot be had.
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from banyan import SGLANG_VERSION, patches
from banyan.feature_list import FEATURES
from banyan.patches.source import text_of

ENGINE_PATCHES = Path(__file__).parents[1] / "cpu_engine" / "banyan_cpu_engine" / "patches"


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


def unpack(wheel: Path, folder: Path) -> None:
    """The sources of a wheel, into ``folder``."""
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder, [name for name in opened.namelist() if name.endswith(".py")])


def report(
    queue: Sequence[patches.Patch], misfits: Sequence[patches.Misfit], *, diff: Callable[[patches.Source], str]
) -> list[str]:
    """The lines to print of a release."""
    lines = []
    for feature in dict.fromkeys([*(feature.name for feature in FEATURES), *(patch.feature for patch in queue)]):
        own = [patch for patch in queue if patch.feature == feature]
        found = [misfit for misfit in misfits if misfit.patch.feature == feature]
        names = _names(found)
        lines.append(f"{feature}: " + (f"{len(names)} of {len(own)} to read again" if names else "fits"))
        for misfit in found:
            lines += [f"  {misfit.patch.name}: {misfit.reason}", *_hook(misfit.patch), *_indented(diff(misfit.source))]
    num_sources = sum(len(patch.sources) for patch in queue)
    lines.append(
        f"{len(queue) - len(_names(misfits))} of {len(queue)} patches of {SGLANG_VERSION} fit, "
        f"{num_sources - len(misfits)} of {num_sources} sources"
    )
    return lines


def diff_from(folder: Path) -> Callable[[patches.Source], str]:
    """How a source of the release in ``folder`` differs from that of the installed one."""

    def diff(source: patches.Source) -> str:
        ours, theirs = text_of(source.target), text_of(source.target, folder=folder)
        if not theirs:
            # The reason says that it is gone.
            return ""
        found = difflib.unified_diff(
            ours.splitlines(), theirs.splitlines(), SGLANG_VERSION, folder.name, lineterm="", n=3
        )
        return "\n".join(found)

    return diff


def _names(misfits: Iterable[patches.Misfit]) -> set[str]:
    return {misfit.patch.name for misfit in misfits}


def _hook(patch: patches.Patch) -> list[str]:
    return [] if patch.hook is None else [f"    hook: {patch.hook}"]


def _indented(text: str) -> list[str]:
    return [f"    | {line}" for line in text.splitlines()]


def main(argv: list[str], *, fetched: Callable[[str, Path], Path] = fetch) -> int:
    parser = argparse.ArgumentParser(prog="make compat", description=__doc__)
    parser.add_argument("release", metavar="SGLANG")
    parser.add_argument("--no-diff", action="store_true", help="leave the upstream changes out")
    asked = parser.parse_args(argv)
    # Its wheel says nothing of the packages that it only asks for: those are released by themselves.
    queue = [
        patch
        for patch in (*patches.load_queue(), *patches.load_queue(ENGINE_PATCHES))
        if all(source.package == "sglang" for source in patch.sources)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / asked.release
        folder.mkdir()
        print(f"fetching sglang {asked.release} ...", flush=True)
        try:
            unpack(fetched(asked.release, folder), folder)
        except subprocess.CalledProcessError as error:
            print(f"compat: sglang {asked.release} cannot be had: {error.stderr.strip()[-500:]}", file=sys.stderr)
            return 2
        misfits = patches.changed(queue, folder)
        lines = report(queue, misfits, diff=(lambda source: "") if asked.no_diff else diff_from(folder))
    print("\n".join(lines))
    return 1 if misfits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
