"""What follows from depth, what is refused, and how flags are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tiny_runs import tiny

from mainstem.errors import ConfigError, MainstemError
from mainstem.training import RECIPES, TrainConfig, recipe, train
from mainstem.training.arguments import options, trainer_arguments
from mainstem.training.run import training_arguments


@pytest.mark.parametrize(
    ("depth", "width", "heads", "batch", "rate"),
    [(24, 64, 2, 8, 2e-3), (8, 64, 2, 8, 3.5e-3), (48, 64, 2, 8, 1.4e-3), (96, 128, 4, 16, 7.1e-4)],
)
def test_everything_follows_from_depth(depth: int, width: int, heads: int, batch: int, rate: float) -> None:
    config = TrainConfig(depth=depth).resolve()
    assert (config.width, config.num_heads) == (width, heads)
    assert config.trainer["per_device_train_batch_size"] == batch
    assert config.trainer["learning_rate"] == rate
    # four tokens for each of the 12 * width^2 parameters of a block
    tokens = config.trainer["max_steps"] * batch * 128
    assert tokens == pytest.approx(4 * depth * 12 * width**2, rel=0.01)


def test_what_is_given_stays() -> None:
    trainer = {"learning_rate": 0.5, "max_steps": 3}
    config = TrainConfig(depth=96, width=48, num_heads=6, trainer=trainer).resolve()
    assert (config.width, config.num_heads) == (48, 6)
    assert config.trainer["learning_rate"] == 0.5
    assert config.trainer["max_steps"] == 3
    assert "max_steps" not in TrainConfig(trainer={"num_train_epochs": 2}).resolve().trainer


def test_a_connection_that_scales_with_depth_keeps_the_rate() -> None:
    def rate(depth: int, rule: str) -> float:
        given: dict[str, Any] = {"connection": "depth_scaled", "connection_options": {"rule": rule}}
        config = TrainConfig(depth=depth, width=64, **given)
        return config.resolve().trainer["learning_rate"]

    assert rate(6, "completep") == rate(96, "completep")
    assert rate(6, "gpt2") == pytest.approx(4 * rate(96, "gpt2"), rel=0.1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"depth": 0}, "depth=0 must be at least 1"),
        ({"window": 1}, "window=1 must be at least 2"),
        ({"held_out": 0.7}, "held_out=0.7 must lie between"),
        ({"optimizer": "sgd"}, "choose 'adamw' or 'muon'"),
        ({"connection": "nothing_like_it"}, "nothing_like_it"),
        ({"connection_options": {"speed": 3}}, "speed"),
        ({"tower": {"width": 3}}, "has an option of its own"),
        ({"tower": {"wings": 3}}, "has no field wings"),
        ({"num_heads": 3}, "not a multiple of num_heads"),
        ({"trainer": {"wings": 3}}, "has no argument 'wings'"),
        ({"trainer": {"output_dir": "x"}}, "use --out instead"),
        ({"trainer": {"optim": "adafactor"}}, "use --optimizer instead"),
        ({"trainer": {"torch_compile": True}}, "use --compile instead"),
        ({"trainer": {"eval_strategy": "sometimes"}}, "the Trainer refuses its arguments"),
        ({"trainer": {"report_to": "nobody"}}, "nobody"),
        ({"text": "./no/such/file.txt"}, "There is no file or folder"),
        ({"tokenizer": "bpe:1"}, "at least 257"),
    ],
)
def test_refused_before_anything_is_written(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(MainstemError) as refused:
        train(tiny(**changes), tmp_path / "run")
    assert says in str(refused.value)
    assert "\n" not in str(refused.value).strip()
    assert not (tmp_path / "run" / "train.json").exists()


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        train(tiny(), tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be made"):
        train(tiny(), tmp_path / "file" / "run")


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root nothing is forbidden, so that the answer is made up here."""
    import mainstem.training.run

    monkeypatch.setattr(mainstem.training.run.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be written to; choose another with --out"):
        train(tiny(), tmp_path / "run")


def test_flags_of_the_trainer() -> None:
    given = trainer_arguments(
        [
            "--max_steps",
            "5",
            "--learning-rate",
            "0.25",
            "--bf16",
            "--lr_scheduler_kwargs",
            '{"min_lr_rate": 0.5}',
        ]
    )
    assert given["max_steps"] == 5
    assert given["learning_rate"] == 0.25
    assert given["bf16"] is True
    assert json.loads(given["lr_scheduler_kwargs"]) == {"min_lr_rate": 0.5}
    assert set(given) == {"max_steps", "learning_rate", "bf16", "lr_scheduler_kwargs"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max_stps", "5"], "did you mean --max_steps?"),
        (["--max_steps", "five"], "--max_steps"),
        (["--max_steps"], "expected one argument"),
        (["--max_steps", "5", "tower96"], "put it first"),
    ],
)
def test_flags_that_are_wrong(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        trainer_arguments(flags)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_pairs() -> None:
    assert options(["num-streams=2", "rule=gpt2", "x=True", "y=1e-3"], "--option") == {
        "num_streams": 2, "rule": "gpt2", "x": True, "y": 1e-3,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="must have the form NAME=VALUE"):
        options(["streams"], "--option")


def test_a_schedule_ends_at_a_tenth(tmp_path: Path) -> None:
    arguments = training_arguments(tiny().resolve(), tmp_path)
    assert arguments.lr_scheduler_type == "cosine_with_min_lr"
    assert arguments.max_grad_norm == 1.0
    own = training_arguments(
        tiny(trainer={"lr_scheduler_type": "linear", "max_grad_norm": 0.5}).resolve(), tmp_path
    )
    assert own.lr_scheduler_type == "linear"
    assert own.max_grad_norm == 0.5


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str, tmp_path: Path) -> None:
    config = recipe(name).resolve()
    assert training_arguments(config, tmp_path).max_steps == config.trainer["max_steps"]
    assert RECIPES[name].__doc__


def test_a_recipe_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="There is no recipe 'cake'; there is"):
        recipe("cake")
