"""mainstem compare: what is alike in its cells, what its figures mean, and that it loses nothing."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mainstem.errors import ConfigError
from mainstem.tower import Tower, TowerConfig

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("scipy")
runs = importlib.import_module("tiny_runs")
compared = importlib.import_module("mainstem.training.compare")
pages = importlib.import_module("mainstem.report.compare")
plan = importlib.import_module("mainstem.training._compare_plan")
callbacks = importlib.import_module("mainstem.training._compare_callbacks")
statistics = importlib.import_module("mainstem.training._compare_statistics")
results = importlib.import_module("mainstem.training._compare_cell")

CompareConfig, compare = compared.CompareConfig, compared.compare


def base(**trainer: Any) -> Any:
    return runs.tiny(trainer={"max_steps": 12, "save_steps": 3, **trainer})


# ---- the plan ------------------------------------------------------------------------------------


def test_the_cells_of_a_seed_differ_in_nothing_but_their_connection() -> None:
    config = CompareConfig(
        connections=("pre_norm", "mhc:num_streams=2"), depths=(2, 4), seeds=(0, 7), base=base()
    )
    cells = config.cells()
    assert [(c.depth, c.seed, c.connection) for c in cells] == [
        (depth, seed, connection)
        for depth in (2, 4)
        for seed in (0, 7)
        for connection in ("pre_norm", "mhc:num_streams=2")
    ]
    assert cells[1].config.connection_options == {"num_streams": 2}
    assert cells[3].config.trainer["seed"] == 7
    assert {cell.config.monitor for cell in cells} == {0}
    for one, other in zip(cells[::2], cells[1::2], strict=True):
        alike = dataclasses.replace(other.config, connection="pre_norm", connection_options={})
        assert alike == one.config


def test_settings_follow_from_each_depth_and_are_the_same_for_all_of_that_depth() -> None:
    config = CompareConfig(
        connections=("pre_norm", "mhc"), depths=(12, 96), base=compared.CompareConfig(connections=("x",)).base
    )
    by_depth: dict[int, set[str]] = {}
    for cell in config.cells():
        settings = {name: cell.config.trainer[name] for name in ("learning_rate", "max_steps")}
        by_depth.setdefault(cell.depth, set()).add(json.dumps([cell.config.width, settings]))
    assert [len(settings) for settings in by_depth.values()] == [1, 1]
    assert by_depth[12] != by_depth[96]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"connections": ()}, "connections is empty"),
        ({"seeds": (1, 1)}, "seeds has 1 twice"),
        ({"baseline": "mhc"}, "baseline 'mhc' is none of those compared"),
        ({"base": base(seed=3)}, "'seed' is set by the comparison; use --seeds"),
        ({"minutes": -1.0, "base": runs.tiny()}, "minutes=-1.0 must be above 0"),
        ({"minutes": 1.0, "base": base()}, "'max_steps' counts steps, and --minutes ends a cell by time"),
    ],
)
def test_a_comparison_that_cannot_be_is_refused(changes: dict[str, Any], says: str) -> None:
    given = {"connections": ("pre_norm", "rezero"), "base": base(), **changes}
    with pytest.raises(ConfigError, match=re.escape(says)):
        CompareConfig(**given)


@pytest.mark.parametrize(
    ("config", "cluster", "says"),
    [
        ({"connections": ("pre_norm", "none_such")}, None, "no connection is called 'none_such'"),
        ({"connections": ("pre_norm", "mhc:streams=2")}, None, "streams"),
        ({"base": base(learning_rat=1)}, None, "'learning_rat'"),
        ({"base": dataclasses.replace(base(), text="nowhere.txt")}, None, "nowhere.txt"),
        ({}, "pbs", "launcher 'pbs' is not known; choose one of slurm, local"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_folder_is_made(
    config: dict[str, Any], cluster: str | None, says: str, tmp_path: Path
) -> None:
    given = {"connections": ("pre_norm",), "depths": (2,), "base": base(), **config}
    with pytest.raises(ValueError, match=re.escape(says)):
        compare(CompareConfig(**given), tmp_path / "out", cluster=cluster)
    assert not (tmp_path / "out").exists()


# ---- an equal start ------------------------------------------------------------------------------


def tower(connection: str, seed: int, **options: Any) -> Tower:
    """A tower drawn as a run draws it, then as a comparison does."""
    torch.manual_seed(seed)
    built = Tower(
        TowerConfig(
            vocab_size=61,
            width=16,
            num_blocks=3,
            num_heads=2,
            connection=connection,
            connection_options=options,
        )
    )
    callbacks.draw_branches(built, seed)
    return built


def branches(built: Tower) -> dict[str, Tensor]:
    found = {"embedding": built.token_embedding.weight}
    for index, _, modules in built.sublayers():
        for kind, module in modules.items():
            found |= {f"{index}.{kind}.{name}": p for name, p in module.named_parameters()}
    return found


@pytest.mark.parametrize(
    "connection", ["highway", "mhc", "mudd", "gru_gate", "gated_streams", "attention_residuals"]
)
def test_a_seed_stands_for_the_same_branches_whatever_the_connection_draws(connection: str) -> None:
    plain, other, another = (
        branches(tower("pre_norm", 5)),
        branches(tower(connection, 5)),
        branches(tower(connection, 6)),
    )
    shared = plain.keys() & other.keys()
    assert len(shared) > 12
    matrices = [name for name in shared if plain[name].ndim > 1]
    for name in matrices:
        # the scheme's own factor, such as GPT-2's 1 / sqrt(2L), is allowed for
        factor = other[name].std() / plain[name].std()
        torch.testing.assert_close(other[name], factor * plain[name])
        assert not torch.allclose(another[name], other[name])


def test_the_connections_keep_what_they_drew_and_the_generator_its_place() -> None:
    torch.manual_seed(3)
    built = Tower(TowerConfig(vocab_size=61, width=16, num_blocks=2, num_heads=2, connection="gru_gate"))
    before = [p.clone() for _, connection, _ in built.sublayers() for p in connection.parameters()]
    state = torch.get_rng_state()
    callbacks.draw_branches(built, 9)
    after = [p for _, connection, _ in built.sublayers() for p in connection.parameters()]
    assert before
    assert all(map(torch.equal, before, after))
    assert torch.equal(state, torch.get_rng_state())


# ---- the clock -----------------------------------------------------------------------------------


def test_a_resumed_clock_keeps_the_steps_that_are_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = {"wall": 100.0, "cores": 50.0}
    hands = SimpleNamespace(perf_counter=lambda: now["wall"], process_time=lambda: now["cores"])
    monkeypatch.setattr(callbacks, "time", hands)
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(f'{{"seconds": {n}, "cpu_seconds": 0}}\n' for n in range(1, 6)) + '{"seco')
    clock = callbacks.Clock(file)
    model = nn.Linear(3, 2)
    clock.on_train_begin(None, SimpleNamespace(global_step=4), None, model=model)
    clock.on_step_begin(None, None, None)
    now.update(wall=103.5, cores=50.25)
    clock.on_step_end(None, None, None)
    assert clock.steps == [(1, 0), (2, 0), (3, 0), (4, 0), (3.5, 0.25)]
    assert callbacks.read_steps(file) == clock.steps
    assert clock.seconds == 13.5
    assert clock.num_parameters == 8


def test_by_time_the_learning_rate_goes_as_by_steps() -> None:
    transformers = pytest.importorskip("transformers")
    steps = 1000
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = transformers.get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=int(callbacks.WARM_UP * steps),
        num_training_steps=steps,
        scheduler_specific_kwargs={"min_lr_rate": callbacks.LEAST_RATE},
    )
    for step in range(1, steps + 1):
        optimizer.step()
        theirs.step()
        assert callbacks.rate_at(step / steps) == pytest.approx(max(0.01, theirs.get_last_lr()[0]), abs=1e-9)


def test_a_run_ends_when_its_time_is_gone_and_is_looked_at_on_the_way(tmp_path: Path) -> None:
    clock = callbacks.Clock(tmp_path / "steps.jsonl")
    end = callbacks.EndByTime(clock, 10.0)
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "initial_lr": 3.0}, {"lr": 0.0, "initial_lr": 1.0}])
    looked: list[int] = []
    rates: list[float] = []
    for step in range(1, 50):
        control = SimpleNamespace(should_evaluate=False, should_save=False, should_training_stop=False)
        end.on_step_begin(None, None, control, optimizer=optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
        assert optimizer.param_groups[1]["lr"] == pytest.approx(rates[-1] / 3)
        clock.steps.append(callbacks.StepTime(0.5, 0.1))
        end.on_step_end(None, None, control)
        if control.should_evaluate and control.should_save:
            looked.append(step)
        if control.should_training_stop:
            break
    assert step == 20
    assert looked == [4, 8, 12, 16]
    assert rates[0] == pytest.approx(0.03)
    assert max(rates) == pytest.approx(3.0)
    assert rates[-1] == pytest.approx(3 * callbacks.rate_at(0.95))


def test_a_cell_whose_comparison_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = callbacks.StopWithParent(os.getppid())
    watch.on_step_begin(None, None, None)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(SystemExit, match="gone"):
        watch.on_step_begin(None, None, None)


PEAK = """
import os
from mainstem.training import _compare_callbacks as callbacks
large = bytearray(os.urandom(1 << 20)) * 300
del large
before = callbacks.start_memory_watch()
assert callbacks.peak_memory() < before + 100e6
large = bytearray(os.urandom(1 << 20)) * 150
del large
assert before + 140e6 < callbacks.peak_memory() < before + 250e6
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot forget a peak")
def test_peak_memory_is_that_since_the_watch_began() -> None:
    """In a process of its own, as a cell is: one that has freed gigabytes gives them out again."""
    subprocess.run([sys.executable, "-c", PEAK], check=True)


# ---- statistics ----------------------------------------------------------------------------------


def spread(name: str, losses: dict[int, float]) -> Any:
    return statistics.spread(name, 24, losses, diverged=0, failed=0)


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_the_paired_test_is_scipys(n: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(n)
    ours, theirs = generator.normal(3, 0.1, n), generator.normal(3.05, 0.1, n)
    pair = statistics.paired(spread("a", dict(enumerate(ours))), spread("b", dict(enumerate(theirs))))
    reference = stats.ttest_rel(ours, theirs)
    interval = reference.confidence_interval(0.99)
    assert pair.t == pytest.approx(reference.statistic)
    assert pair.p == pytest.approx(reference.pvalue)
    assert pair.interval == pytest.approx((interval.low, interval.high))
    assert pair.detectable == pytest.approx((interval.high - interval.low) / 2)
    assert pair.std == pytest.approx(np.std(ours - theirs, ddof=1))


def test_with_three_seeds_a_mean_of_the_detectable_size_has_p_of_one_in_a_hundred() -> None:
    # Student's t with 2 degrees of freedom has a closed form: p = 1 - t / sqrt(2 + t^2)
    pair = statistics.paired(spread("a", {0: 3.1, 1: 3.3, 2: 3.0}), spread("b", dict.fromkeys(range(3), 3.0)))
    t = pair.detectable / (pair.std / math.sqrt(3))
    assert 1 - t / math.sqrt(2 + t**2) == pytest.approx(0.01)
    assert pair.verdict == "no difference"


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ({0: 2.0, 1: 2.01, 2: 2.02}, {0: 3.0, 1: 3.01, 2: 3.021}, "lower"),
        ({0: 4.0, 1: 4.01, 2: 4.02}, {0: 3.0, 1: 3.01, 2: 3.021}, "higher"),
        ({0: 3.0, 1: 3.1, 2: 3.2}, {0: 3.1, 1: 3.05, 2: 3.21}, "no difference"),
        ({0: 3.0, 1: 3.1}, {0: 3.0, 1: 3.1}, "no difference"),
        ({0: 3.5, 1: 3.75}, {0: 3.25, 1: 3.5}, "higher"),
        ({0: 2.0, 1: 2.0}, {0: 3.0, 5: 3.0}, "too few"),
        ({}, {0: 3.0, 1: 3.0}, "too few"),
    ],
)
def test_the_verdict(ours: dict[int, float], theirs: dict[int, float], verdict: str) -> None:
    pair = statistics.paired(spread("a", ours), spread("b", theirs))
    assert pair.verdict == verdict
    assert pair.differences == {s: ours[s] - theirs[s] for s in ours.keys() & theirs.keys()}


def test_the_noise_of_seeds_is_the_residual_of_one_way_anova() -> None:
    groups = [{0: 3.0, 1: 3.2, 2: 3.1}, {0: 5.0, 1: 5.5}, {0: 9.0}]
    noise = statistics.seed_noise([spread(str(i), losses) for i, losses in enumerate(groups)])
    residuals = np.concatenate([np.array(list(g.values())) - np.mean(list(g.values())) for g in groups])
    assert noise.degrees_of_freedom == 6 - 3
    assert noise.std == pytest.approx(np.sqrt(np.sum(residuals**2) / (6 - 3)))
    assert statistics.seed_noise([spread("a", {0: 1.0})]) is None


# ---- from results to the table -------------------------------------------------------------------


def figures(loss: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "stopped": None if loss is not None else "Training stopped: the loss of step 4 is nan",
        "loss": loss,
        "bits_per_byte": None if loss is None else loss / math.log(2),
        "start_loss": 5.0,
        "steps": 10,
        "tokens": 320,
        "seconds_per_step": 0.5,
        "cpu_seconds_per_step": 0.25,
        "train_seconds": 5.0,
        "num_parameters": 1234,
        "peak_memory": 400_000_000,
        "memory_before": 300_000_000,
        "train_curve": [[5, 4.0]],
        "held_out_curve": [[0, 5.0], [10, loss]],
        "data": {"text": "t"},
        "versions": {"torch": "2"},
        "device": "CPU",
        "seconds": 9.0,
        **changes,
    }


@pytest.fixture
def made(tmp_path: Path) -> tuple[Any, Path]:
    """A comparison whose results were written by hand: one scheme lower, one diverging, one that failed."""
    config = CompareConfig(
        connections=("pre_norm", "rezero", "post_norm", "deep_norm"), depths=(24,), base=base()
    )
    results: dict[str, list[float | None]] = {
        "pre_norm": [3.0, 3.01, 3.02],
        "rezero": [2.5, 2.51, 2.521],
        "post_norm": [None, 5.5, 3.0],
        "deep_norm": [3.0, 3.0],
    }
    for cell in config.cells():
        folder = tmp_path / "cells" / cell.name
        folder.mkdir(parents=True)
        losses = results[cell.connection]
        if cell.seed < len(losses):
            (folder / "result.json").write_text(json.dumps(figures(losses[cell.seed])))
        else:
            (folder / "output.txt").write_text("Traceback\nMemoryError: no room\n\n")
    return compared.read_comparison(config, tmp_path), tmp_path


def test_diverged_and_failed_runs_are_counted_and_leave_the_mean(made: tuple[Any, Path]) -> None:
    result, _ = made
    spreads = {one.connection: one for one in result.spreads}
    assert (spreads["post_norm"].diverged, spreads["post_norm"].losses) == (2, {2: 3.0})
    assert (spreads["deep_norm"].failed, len(spreads["deep_norm"].losses)) == (1, 2)
    assert spreads["pre_norm"].mean == pytest.approx(3.01)
    says = {cell.name: cell.says for cell in result.cells if cell.status != "finished"}
    assert says == {
        "post_norm-d24-s0": "Training stopped: the loss of step 4 is nan",
        "post_norm-d24-s1": "the held-out loss went from 5.0000 up to 5.5000",
        "deep_norm-d24-s2": "MemoryError: no room",
    }
    assert {pair.connection: pair.verdict for pair in result.pairs} == {
        "rezero": "lower",
        "post_norm": "too few",
        "deep_norm": "no difference",
    }


def test_cells_that_wait_have_not_failed(made: tuple[Any, Path]) -> None:
    result, out = made
    config = CompareConfig(connections=tuple(result.settings["connections"]), depths=(24,), base=base())
    now = compared.read_comparison(config, out, ["deep_norm-d24-s2"])
    assert [(c.name, c.says) for c in now.cells if c.status == "waiting"] == [("deep_norm-d24-s2", None)]
    assert sum(one.failed for one in now.spreads) == 0
    assert {row[0]: row[2] for row, _ in pages.table_rows(now, 24)}["deep_norm"] == "2/3"


def test_the_table_the_page_and_the_csv_say_the_same(made: tuple[Any, Path]) -> None:
    result, out = made
    rows = {row[0]: (row, verdict) for row, verdict in pages.table_rows(result, 24)}
    assert rows["rezero"][0][1:4] == ["2.5103 ± 0.0105", "3/3", "0"]
    assert rows["post_norm"][0][1:4] == ["3.0000", "1/3", "2"]
    assert rows["pre_norm"][0][6] == "baseline"
    assert rows["rezero"][0][7:] == ["0.5", "0.25", "400", "1,234"]
    files = pages.write_comparison(result, out)
    page = (out / "compare.md").read_text()
    assert all("| " + " | ".join(row) + " |" in page for row, _ in rows.values())
    assert "deep_norm-d24-s2 failed: MemoryError: no room" in page
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []
    with (out / "compare.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["connection"], line["status"], line["loss"]) for line in lines[:3]] == [
        ("pre_norm", "finished", "3.0"),
        ("rezero", "finished", "2.5"),
        ("post_norm", "diverged", ""),
    ]
    assert files[0] == out / "compare.csv"


def test_the_picture_has_a_line_for_every_seed(made: tuple[Any, Path]) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    result, out = made
    drawn: list[Any] = []
    figure = matplotlib.figure.Figure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
        pages.plot_curves(result, 24, out / "curves.svg")
    axes = {axis.get_title(): axis for axis in drawn[0].axes}
    assert {name: len(axis.lines) for name, axis in axes.items()} == {
        "pre_norm": 3,
        "rezero": 6,
        "post_norm (2 diverged)": 6,
        "deep_norm": 5,
    }
    ends = [line.get_ydata()[-1] for line in axes["rezero"].lines]
    assert ends == [3.0, 3.01, 3.02, 2.5, 2.51, 2.521]
    pages.plot_curves(result, 24, out / "curves.svg")
    assert "<svg" in (out / "curves.svg").read_text()


def test_every_name_in_the_json_is_explained(made: tuple[Any, Path]) -> None:
    result, _ = made
    page = (ROOT / "docs" / "compare.md").read_text("utf-8")

    def names(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(names, value))
        if not isinstance(value, dict):
            return set()
        return set(value) | set().union(*(names(v) for k, v in value.items() if k not in OTHERS))

    OTHERS = {"base", "config", "provenance"}  # explained by TrainConfig, or by those who made them
    data = json.loads(pages.comparison_to_json(result))
    assert data["schema"] == "mainstem.compare/1"
    assert [name for name in sorted(names(data)) if f"`{name}`" not in page] == []


def test_time_left_takes_what_is_known_best() -> None:
    cells = CompareConfig(connections=("pre_norm", "mhc"), depths=(10, 40), seeds=(0, 1), base=base()).cells()
    of = {cell.name: cell for cell in cells}
    left = compared.seconds_left
    assert left([of["mhc-d10-s0"]], {}, {}) is None
    taken = {("pre_norm", 10): [20.0, 30.0]}
    assert left([of["pre_norm-d10-s1"]], taken, {}) == pytest.approx(25)
    assert left([of["mhc-d10-s0"]], taken, {"mhc-d10-s0": 0.8}) == pytest.approx(5)
    assert left([of["mhc-d40-s0"], of["pre_norm-d40-s0"]], taken, {}) == pytest.approx(200)
    taken[("mhc", 10)] = [100.0]
    assert left([of["mhc-d10-s1"], of["pre_norm-d10-s1"]], taken, {}) == pytest.approx(125)


@pytest.mark.parametrize("stopped", [None, "Training stopped: the loss of step 3 is nan"])
def test_a_result_is_read_from_the_log_as_far_as_it_goes(stopped: str | None, tmp_path: Path) -> None:
    cell = CompareConfig(connections=("pre_norm",), depths=(2,), base=base()).cells()[0]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.json").write_text('{"data": {}}')
    records = [{"step": 1, "loss": 5.5}, {"step": 2, "loss": math.nan}]
    if stopped is None:
        records += [{"step": 2, "eval_loss": 4.0}, {"step": 2, "eval_bits_per_byte": 5.8}]
    (tmp_path / "run" / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "steps.jsonl").write_text(
        "".join(f'{{"seconds": {n}, "cpu_seconds": {n / 8}}}\n' for n in (1, 4, 2))
    )
    found = results._result(cell, tmp_path, callbacks.Clock(tmp_path / "steps.jsonl"), stopped)
    assert (found["loss"], found["bits_per_byte"]) == ((None, None) if stopped else (4.0, 5.8))
    assert (found["stopped"], found["start_loss"]) == (stopped, None)
    assert found["train_curve"] == [(1, 5.5), (2, None)]
    assert (found["steps"], found["tokens"]) == (3, 3 * 2 * 16)
    assert (found["seconds_per_step"], found["cpu_seconds_per_step"], found["train_seconds"]) == (2, 0.25, 7)
