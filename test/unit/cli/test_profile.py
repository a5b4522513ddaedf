# SPDX-License-Identifier: Apache-2.0
"""`banyan profile` against a rank whose forwards take a known time."""

import pytest

from banyan import cli
from banyan.cli.engine import EngineError
from banyan.cli.profile import Grid, measure
from banyan.planner import PrefillCost, profile

PAGE = 16
COST = PrefillCost(fixed_us=5000.0, token_us=300.0, pair_us=0.1, context_us=1.0)
GRID = Grid((16, 64, 256), (0, 512, 1024), num_held_out=5, num_repeats=2, seed=0)


class FakeEngine:
    """One rank with a prefix tree and a per-layer clock; it cuts prompts at ``chunk`` and evicts all every so often."""

    def __init__(self, *, chunk=4096, pool=20_000, evict_every=10**9):
        self.chunk, self.pool, self.evict_every = chunk, pool, evict_every
        self.pages, self.forwards, self.num_prompts = set(), [], 0

    def server_info(self):
        return {"page_size": PAGE, "model_path": "m", "context_length": 8192, "max_total_num_tokens": self.pool}

    def ranks(self):
        return {0: {"num_layers": 30, "forwards": self.forwards[-64:]}}

    def prefill(self, token_ids, *, rank):
        assert rank == 0
        self.num_prompts += 1
        if self.num_prompts % self.evict_every == 0:
            self.pages.clear()
        ends = range(PAGE, len(token_ids), PAGE)
        done = max((end for end in ends if tuple(token_ids[:end]) in self.pages), default=0)
        while done < len(token_ids):
            extend = min(self.chunk, len(token_ids) - done)
            number = len(self.forwards)
            self.forwards.append(
                {"number": number, "pieces": [[extend, done]], "forward_us": COST.time_us([(extend, done)])}
            )
            done += extend
        self.pages.update(tuple(token_ids[:end]) for end in range(PAGE, len(token_ids) + 1, PAGE))


def run(engine, grid=GRID):
    return measure(engine, grid, rank=0, provenance={"date": "today"}, progress=lambda line: None)


def test_measure_when_the_rank_keeps_to_a_cost_then_it_is_found_and_tested_on_other_lengths():
    measured = run(FakeEngine())
    assert measured.cost.token_us == pytest.approx(COST.token_us, rel=1e-3)
    assert measured.held_out_error < 1e-3
    assert len(measured.samples) == 2 * 9 and len(measured.held_out) == 5
    cells = {sample.pieces for sample in measured.samples}
    assert not cells & {sample.pieces for sample in measured.held_out}
    assert measured.slack.layer_us[2][1] == pytest.approx(COST.time_us([(256, 512)]) / 30)


def test_measure_when_a_prefix_is_evicted_meanwhile_then_the_cell_is_measured_again():
    engine = FakeEngine(evict_every=5)
    measured = run(engine)
    assert sorted({sample.pieces[0] for sample in measured.samples}) == sorted(GRID.cells())
    assert measured.held_out_error < 1e-3
    assert engine.num_prompts > len(measured.samples) + len(measured.held_out) + 2 * len(GRID.prefix_tokens)


def test_measure_when_prefixes_are_always_evicted_then_the_reasons_are_said():
    with pytest.raises(EngineError, match="in one forward"):
        run(FakeEngine(evict_every=1))


def test_measure_when_prompts_are_cut_then_the_flag_is_named():
    with pytest.raises(EngineError, match="--chunked-prefill-size"):
        run(FakeEngine(chunk=100))


def test_measure_when_the_pool_is_too_small_then_refused_before_anything_runs():
    engine = FakeEngine(pool=1000)
    with pytest.raises(EngineError, match="pool is 1000: lower --extend"):
        run(engine)
    assert engine.num_prompts == 0


def test_measure_when_the_server_times_no_forwards_then_it_says_so(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(engine, "ranks", lambda: {0: {"num_layers": 30, "forwards": []}})
    with pytest.raises(EngineError, match="times no forwards"):
        run(engine)


def test_measure_when_the_rank_does_not_exist_then_the_ranks_are_named():
    with pytest.raises(EngineError, match=r"--rank 3: the server has ranks \[0\]"):
        measure(FakeEngine(), GRID, rank=3, provenance={}, progress=lambda line: None)


def test_profile_when_run_then_the_file_is_written_and_the_error_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("banyan.cli.engine.Engine", lambda url: FakeEngine())
    path = tmp_path / "profile.json"
    command = ["profile", "--output", str(path), "--extend", "16,64,256", "--prefix", "0,512,1024", "--held-out", "3"]
    assert cli.main(command) == 0
    assert profile.load(path).held_out_error < 0.01
    assert "that the fit has not seen: 0.0%" in capsys.readouterr().out


def test_profile_when_no_server_answers_then_one_line_and_exit_1(tmp_path, capsys):
    path = tmp_path / "profile.json"
    assert cli.main(["profile", "--url", "http://127.0.0.1:9", "--output", str(path)]) == 1
    assert "is the server running" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize("lengths", ["64,16", "16,16", "-1,5", "x"])
def test_profile_when_lengths_do_not_ascend_then_refused(lengths, capsys):
    with pytest.raises(SystemExit):
        cli.main(["profile", "--extend=" + lengths])
    assert "--extend" in capsys.readouterr().err
