"""Models that are placed, compiled or checkpointed give the figures of the plain model, or say why not."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from tiny_sources import llama_config

from mainstem.audit import audit_windows, map_of
from mainstem.sources import LoadedModel, load_model, load_text, make_windows

accelerate: Any = importlib.import_module("accelerate")
transformers: Any = importlib.import_module("transformers")

COMPILE: dict[str, Any] = {"backend": "eager"}  # what is compiled matters here, not how well


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(llama_config(num_hidden_layers=3, num_key_value_heads=2))
    return tiny.save(model.eval(), tmp_path_factory.mktemp("placed") / "llama")


def figures(loaded: LoadedModel, folder: Path) -> dict[str, Any]:
    windows = make_windows(loaded.tokenizer, load_text(tiny.GPL), num_tokens=90, window=16, batch_size=4)
    found = audit_windows(loaded, windows, tiny.config(folder)).to_dict()
    del found["provenance"]
    return found


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[LoadedModel, dict[str, Any]]:
    loaded = load_model(folder)
    return loaded, figures(loaded, folder)


def whole(model: Any) -> Any:
    return torch.compile(model, **COMPILE)


def in_place(model: Any) -> Any:
    model.compile(**COMPILE)
    return model


def forward_alone(model: Any) -> Any:
    model.forward = torch.compile(model.forward, **COMPILE)
    return model


def decoder(model: Any) -> Any:
    model.model = torch.compile(model.model, **COMPILE)
    return model


def blocks_wrapped(model: Any) -> Any:
    for number, block in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(block, **COMPILE)
    return model


def blocks_in_place_and_run(model: Any) -> Any:
    """Hooks that are put on a module after its compiled code ran do not fire (pytorch#117758)."""
    for block in model.model.layers:
        block.compile(**COMPILE)
    with torch.no_grad():
        model(input_ids=torch.arange(14).reshape(2, 7))
    return model


def recomputing(*, use_reentrant: bool) -> Callable[[Any], Any]:
    def made(model: Any) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model.train()

    return made


CASES: dict[str, Callable[[Any], Any]] = {
    "compiled": whole,
    "compiled in place": in_place,
    "forward compiled": forward_alone,
    "decoder compiled": decoder,
    "blocks compiled": blocks_wrapped,
    "blocks compiled in place, and run": blocks_in_place_and_run,
    "gradient checkpointing": recomputing(use_reentrant=False),
    "gradient checkpointing, reentrant": recomputing(use_reentrant=True),
    "weights on the host": lambda m: accelerate.cpu_offload(m, execution_device=torch.device("cpu")),
}


# What it warns of, global hooks that fire for its wrapper too, is what these cases are about.
@pytest.mark.filterwarnings("ignore:Using .torch.compile.module:UserWarning")
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c.endswith("and run") else c for c in CASES]
)
def test_the_figures_are_those_of_the_plain_model(
    case: str, plain: tuple[LoadedModel, dict[str, Any]], folder: Path
) -> None:
    model = CASES[case](transformers.LlamaForCausalLM.from_pretrained(folder).eval())
    found = figures(dataclasses.replace(plain[0], model=model), folder)
    assert found == plain[1]
    assert found["gradient"] is not None
    assert found["identity"] is not None


@pytest.mark.parametrize("where", ["some blocks", "everything"])
def test_weights_on_disk(
    where: str, plain: tuple[LoadedModel, dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    names = ("embed_tokens", "norm", "rotary_emb", "layers.0", "layers.1", "layers.2")
    places = {
        f"model.{name}": "disk" if where == "everything" or name == "layers.1" else "cpu" for name in names
    }
    places["lm_head"] = "disk" if where == "everything" else "cpu"
    if where == "everything":
        accelerate.disk_offload(model, tmp_path / "disk", execution_device=torch.device("cpu"))
    else:
        model = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path / "disk")
    assert any(p.is_meta for p in model.parameters())
    assert figures(dataclasses.replace(plain[0], model=model), folder) == plain[1]
    assert any(p.is_meta for p in model.parameters())  # and they went back


def test_a_model_that_is_spread_by_itself(folder: Path) -> None:
    assert map_of(str(folder), device="auto").blocks == map_of(str(folder)).blocks
