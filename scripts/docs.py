# SPDX-License-Identifier: Apache-2.0
"""Writes what is made from code, parts of the documentation and the files of deploy/: ``make docs``.

A page holds ``<!-- made: NAME -->`` and ``<!-- end -->``; what is between is replaced. ``--check`` writes nothing,
names what it would write, and exits with 1 if there is anything.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Whoever starts this file by its name has only its folder on the path.
sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent))
import patch_index as index
import watching
from tables import figure_table, knob_table, path_table

from banyan import config, patches
from banyan.router import settings
from benchmark import carriers_page, ceiling_runs, left_out_answers, pd_page, ranks_page, rates_page, remote_page
from benchmark.alternatives import documented
from benchmark.overhead import kept as overhead

ROOT = Path(__file__).parents[1]
ENGINE_PATCHES = ROOT / "cpu_engine" / "banyan_cpu_engine" / "patches"


def _text(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


PARTS: dict[str, Callable[[], str]] = {
    "features": index.feature_table,
    "engine patches": lambda: index.table(patches.load_queue(ENGINE_PATCHES)),
    "knobs sharing": lambda: knob_table(config.Config, config.SHARING),
    "knobs tiers": lambda: knob_table(config.Config, config.TIERS),
    "knobs nodes": lambda: knob_table(config.Config, config.NODES),
    "knobs gpu": lambda: knob_table(config.Config, config.GPU),
    "knobs router": lambda: knob_table(settings.Settings, settings.ROUTER),
    "other figures": lambda: figure_table(_text("stores") + _text("operations"), "other figures"),
    "paths": path_table,
    "alerts": watching.alert_table,
    "pd figures": pd_page.table,
    "dual figures": pd_page.dual_table,
    "slow figures": pd_page.slow_table,
    "classes figures": pd_page.classes_table,
    "combined figures": pd_page.combined_table,
    "remote figures": remote_page.table,
    "faults figures": remote_page.faults_table,
    "source figures": remote_page.source_table,
    "nixl figures": remote_page.nixl_table,
    "nixl kills figures": remote_page.nixl_kills_table,
    "carriers figures": carriers_page.table,
    "ceiling runs figures": ceiling_runs.table,
    "left out answers figures": left_out_answers.table,
    "ranks figures": ranks_page.table,
    "rates figures": rates_page.table,
    "alternatives figures": documented.tables,
    "overhead figures": overhead.table,
}
MADE = re.compile(r"(?<=<!-- made: )(?P<name>[a-z ]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def pages() -> Iterator[tuple[Path, str]]:
    """Every page that holds something made, and its text as it should be."""
    yield ROOT / "docs" / "patches.md", index.page()
    yield ROOT / "deploy" / "prometheus" / "banyan-alerts.yml", watching.alert_rules()
    yield ROOT / "deploy" / "grafana" / "banyan.json", watching.dashboard()
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text()
        made = MADE.sub(lambda found: f"{found['name']} -->\n\n{PARTS[found['name']]()}\n", text)
        if MADE.search(text):
            yield path, made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when something is stale")
    only_checks = parser.parse_args().check
    stale = [(path, text) for path, text in pages() if not path.exists() or path.read_text() != text]
    for path, text in stale:
        print(f"{'stale' if only_checks else 'wrote'}: {path.relative_to(ROOT)}")
        if not only_checks:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return 1 if only_checks and stale else 0


if __name__ == "__main__":
    sys.exit(main())
