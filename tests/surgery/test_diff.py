"""What two models are said to differ in is what they differ in."""

from __future__ import annotations

import copy
import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tiny_sources import llama_config, train_tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from mainstem.errors import ConfigError
from mainstem.report import plain_console
from mainstem.report.diff import diff_lines, diff_to_csv, diff_to_json, print_diff, write_diff
from mainstem.sources import LoadedModel, WindowBatch
from mainstem.surgery import Cut, DiffConfig, cut, diff, diff_models
from mainstem.surgery.diff import Diff
from mainstem.surgery.diff_blocks import match_blocks, prune_record
from mainstem.surgery.diff_weights import compare_weights, relative


def llama(dtype: torch.dtype = torch.float64, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(num_hidden_layers=4, **changes)).to(dtype).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


def windows() -> list[WindowBatch]:
    """Two windows, of which the second is shorter and padded."""
    ids = torch.randint(3, 384, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return [WindowBatch(input_ids=ids, attention_mask=mask, position_ids=ids, first_sequence=0, num_added=0)]


def compared(a: nn.Module, b: nn.Module, record: dict[str, Any] | None = None) -> Diff:
    models = [LoadedModel(model=model, tokenizer=None, provenance={}) for model in (a, b)]
    return diff_models((models[0], models[1]), windows(), {}, (None, record))


def branch_outputs(model: LlamaForCausalLM, name: str) -> list[Tensor]:
    """What the attention or the feed-forward of every block returns, by hooks, first tokens left out."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, __: Any, out: Any) -> None:
        value = out[0] if isinstance(out, tuple) else out
        real = windows()[0].attention_mask.bool().clone()
        real[:, 0] = False
        seen.append(value[real])

    hooks = [getattr(layer, name).register_forward_hook(keep) for layer in model.model.layers]
    with torch.no_grad():
        model(input_ids=windows()[0].input_ids, attention_mask=windows()[0].attention_mask)
    for hook in hooks:
        hook.remove()
    return seen


def test_a_model_does_not_differ_from_itself() -> None:
    model = llama()
    found = compared(model, copy.deepcopy(model))
    changes = [found.entry, *(c for block in found.blocks for c in (*block.writes.values(), block.stream))]
    assert len(changes) == 1 + 4 * 3
    assert {change.change for change in changes} == {0.0}
    assert all(change.cosine == pytest.approx(1.0, abs=1e-12) for change in changes)
    assert (found.loss.difference, found.loss.mean_kl, found.loss.max_logit_difference) == (0.0, 0.0, 0.0)
    weights = [found.outside, *(block.weights for block in found.blocks)]
    assert all(one is not None and one.change == 0.0 and one.largest is None for one in weights)
    assert "no block writes otherwise" in diff_lines(found)[2]


def test_a_matrix_that_is_doubled_shows_where_it_stands() -> None:
    a, b = llama(), llama()
    b.model.layers[1].self_attn.o_proj.weight.data *= 2
    found = compared(a, b)
    assert [block.stream.change == 0.0 for block in found.blocks] == [True, False, False, False]
    attention = found.blocks[1].writes["attn"]
    assert attention.change == pytest.approx(1.0, rel=1e-12)
    assert attention.cosine == pytest.approx(1.0, rel=1e-12)
    assert attention.size == pytest.approx(2.0, rel=1e-12)
    weights = found.blocks[1].weights
    assert weights is not None
    assert (weights.largest, weights.largest_change) == ("self_attn.o_proj.weight", pytest.approx(1.0))
    assert all(found.blocks[i].weights.change == 0.0 for i in (0, 2, 3))  # type: ignore[union-attr]


def test_figures_are_those_of_plain_hooks() -> None:
    a, b = llama(), llama()
    for layer in b.model.layers:
        layer.mlp.down_proj.weight.data += 0.05 * torch.randn_like(layer.mlp.down_proj.weight)
    found = compared(a, b)
    for kind, name in (("attn", "self_attn"), ("mlp", "mlp")):
        for block, first, second in zip(
            found.blocks, branch_outputs(a, name), branch_outputs(b, name), strict=True
        ):
            change = block.writes[kind]
            assert change.change == pytest.approx(float((second - first).norm() / first.norm()), rel=1e-9)
            cosine = torch.nn.functional.cosine_similarity(first.flatten(), second.flatten(), dim=0)
            assert change.cosine == pytest.approx(float(cosine), rel=1e-9)
            assert change.size == pytest.approx(float(second.norm() / first.norm()), rel=1e-9)


def test_loss_and_its_standard_error() -> None:
    a, b = llama(), llama()
    b.lm_head.weight.data *= 1.1
    loss = compared(a, b).loss
    batch = windows()[0]
    means, counts = [], []
    for row, length in ((0, 12), (1, 8)):
        ids = batch.input_ids[row : row + 1, :length]
        with torch.no_grad():
            pair = [
                torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]) for model in (a, b)
            ]
        means.append(torch.stack(pair))
        counts.append(length - 1)
    weights = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    both = (torch.stack(means) * weights[:, None]).sum(0)
    assert (loss.a, loss.b) == (pytest.approx(float(both[0])), pytest.approx(float(both[1])))
    apart = torch.stack([pair[1] - pair[0] for pair in means])
    # Two windows: sqrt(n / (n - 1) sum (share * (d - mean))^2).
    error = (2 * (weights * (apart - loss.difference)).square().sum()).sqrt()
    assert loss.standard_error == pytest.approx(float(error), rel=1e-6)
    assert (loss.num_windows, loss.num_tokens) == (2, 18)


def test_blocks_of_a_pruned_model_are_matched_by_its_record() -> None:
    model = llama(torch.float32)
    record = {"num_blocks": {"before": 4, "after": 3}, "kept_ranges": [[0, 2], [3, 4]]}
    found = compared(model, cut(model, Cut(blocks=(2,))), record)
    assert [(block.a, block.b) for block in found.blocks] == [(0, 0), (1, 1), (3, 2)]
    assert found.only_a == (2,)
    assert found.only_b == ()
    assert "prune.json of B" in found.matched
    assert [block.stream.change == 0.0 for block in found.blocks] == [True, True, False]
    assert all(block.weights is not None and block.weights.change == 0.0 for block in found.blocks)
    by_order = compared(model, cut(model, Cut(blocks=(2,))))
    assert by_order.matched == "by order"
    assert by_order.only_a == (3,)


def test_matching() -> None:
    record = {"num_blocks": {"before": 4, "after": 2}, "kept_ranges": [[1, 2], [3, 4]]}
    assert match_blocks(4, 2, None, record) == ([(1, 0), (3, 1)], "by the prune.json of B")
    assert match_blocks(2, 4, record, None) == ([(0, 1), (1, 3)], "by the prune.json of A")
    assert match_blocks(3, 2, None, record) == ([(0, 0), (1, 1)], "by order")
    assert match_blocks(4, 2, None, {**record, "kept_ranges": [[0, 3]]})[1] == "by order"


def test_a_record_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert prune_record(str(tmp_path)) is None
    (tmp_path / "prune.json").write_text("{")
    assert prune_record(str(tmp_path)) is None
    (tmp_path / "prune.json").write_text('{"num_blocks": 1}')
    assert prune_record(str(tmp_path)) == {"num_blocks": 1}


@pytest.mark.parametrize("name", ["layer_scale", "mhc", "attention_residuals"])
def test_a_converted_model_writes_what_it_wrote(name: str) -> None:
    from mainstem.surgery import convert_tower
    from mainstem.tower.hf import MainstemForCausalLM
    from mainstem.tower.pretrained import tower_from_transformers

    a = llama()
    tower, changes = convert_tower(tower_from_transformers(a), name)
    found = compared(a, MainstemForCausalLM.from_tower(tower))
    figures = [c.change for block in found.blocks for c in (*block.writes.values(), block.stream)]
    assert len(figures) == 4 * 3
    # transformers turns positions in fp32, which rounds at 6e-8, a tower in fp64; measured 2.3e-7.
    assert max(figures) < 1e-6
    weights = [block.weights for block in found.blocks]
    assert all(one is not None and one.change == 0.0 and one.only_a == () for one in weights)
    new = [f"blocks.{i}.{n}" for i, one in enumerate(weights) if one is not None for n in one.only_b]
    outside = found.outside.only_b if found.outside is not None else ()
    parameters = dict(tower.named_parameters())
    assert {*new, *outside} == {n for n in changes["new"] if n in parameters}


def test_what_was_nothing_before_has_no_relative_change(tmp_path: Path) -> None:
    a, b = llama(), llama()
    a.model.layers[2].mlp.down_proj.weight.data.zero_()
    found = compared(a, b)
    change = found.blocks[2].writes["mlp"]
    assert change.change == math.inf
    assert math.isnan(change.cosine)
    said = json.loads(diff_to_json(found))
    assert said["schema"] == "mainstem.diff/1"
    assert said["blocks"][2]["writes"]["mlp"] == {"change": None, "cosine": None, "size": None}
    print_diff(found, plain_console())
    assert [path.name for path in write_diff(found, tmp_path / "out")] == ["diff.json", "diff.csv"]
    rows = list(csv.DictReader((tmp_path / "out" / "diff.csv").read_text("utf-8").splitlines()))
    assert [row["a"] for row in rows] == ["0", "1", "2", "3"]
    assert float(rows[2]["weights.num_tensors"]) == 9
    assert diff_to_csv(found).startswith("a,b,writes.attn.change,")


def test_weights_tensor_by_tensor() -> None:
    a = {"x": torch.tensor([3.0, 4.0]), "y": torch.tensor([1.0]), "z": torch.ones(2)}
    b = {"x": torch.tensor([3.0, 7.0]), "y": torch.tensor([1.0]), "z": torch.ones(3), "w": torch.ones(1)}
    found = compare_weights(a, b)
    assert found.change == pytest.approx(3 / math.sqrt(26))
    assert (found.largest, found.largest_change, found.num_tensors) == ("x", pytest.approx(0.6), 2)
    assert (found.only_a, found.only_b) == (("z",), ("z", "w"))
    assert math.isnan(compare_weights({}, {}).change)
    assert (relative(0.0, 0.0), relative(1.0, 0.0)) == (0.0, math.inf)


def test_what_cannot_be_laid_side_by_side_is_refused(tmp_path: Path, gpl_text: Path) -> None:
    with pytest.raises(ConfigError, match=r"1 x 16.*1 x 24.*differ in size"):
        compared(llama(), llama(hidden_size=24))
    text = gpl_text.read_text("utf-8")
    for name, part, size in (("a", text[:8000], 384), ("b", text[8000:16000], 300)):
        llama(torch.float32).save_pretrained(tmp_path / name)
        train_tokenizer(part, size).save_pretrained(tmp_path / name)

    def config(b: str) -> DiffConfig:
        a, other = str(tmp_path / "a"), str(tmp_path / b)
        return DiffConfig(a=a, b=other, text=str(gpl_text), tokens=60, window=20)

    with pytest.raises(ConfigError, match="other tokens"):
        diff(config("b"))
    same = diff(config("a"))
    assert same.loss.difference == 0.0
    assert same.loss.num_tokens == 57
