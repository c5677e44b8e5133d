"""Attribution of a logit against a derivation by hooks and the norms' formulas, in fp64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import CASES

from mainstem.errors import BooksError, ConfigError, StreamNotFoundError
from mainstem.observe import Attribution, Ledger, attribute, find_stream, ledger_and_tail
from mainstem.observe._tail import Slot, Tail, Taped

PLACE = (1, 7)


def rms_norm(weight_of: Callable[[nn.Module], Tensor], eps: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """``c -> c * gamma / sigma``, sigma that of the whole state; nothing is added."""

    def apply(norm: Any, parts: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        sigma = (whole.square().mean(-1, keepdim=True) + getattr(norm, eps)).sqrt()
        return parts * weight_of(norm) / sigma, torch.zeros_like(whole)

    return apply


def layer_norm(eps: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """``c -> (c - mean(c)) * gamma / sigma``; the bias is added."""

    def apply(norm: Any, parts: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        centred = whole - whole.mean(-1, keepdim=True)
        sigma = (centred.square().mean(-1, keepdim=True) + getattr(norm, eps)).sqrt()
        bias = getattr(norm, "bias", None)
        added = torch.zeros_like(whole) if bias is None else bias
        return (parts - parts.mean(-1, keepdim=True)) * norm.weight / sigma, added

    return apply


@dataclasses.dataclass(frozen=True)
class Wiring:
    """Where a model keeps what is added to its stream, and what it makes of the sum."""

    body: str
    blocks: str
    embed: str
    positions: str | None
    writes: tuple[str, str]
    norm: str
    apply: Callable[..., tuple[Tensor, Tensor]]
    embed_scale: Callable[[Any], float] = lambda config: 1.0
    write_scale: Callable[[Any], float] = lambda config: 1.0
    after: Callable[[Tensor, Any], Tensor] = lambda logit, config: logit
    transforms: tuple[str, ...] = ()
    rounding: float = 1e-6  # these norms work in fp32 in a model of fp64


LIKE_LLAMA = ("model", "layers", "embed_tokens", None)
WIRINGS = {
    "gpt2": Wiring(
        "transformer", "h", "wte", "wpe", ("attn", "mlp"), "ln_f", layer_norm("eps"), rounding=1e-11
    ),
    "gemma2": Wiring(
        *LIKE_LLAMA,
        ("post_attention_layernorm", "post_feedforward_layernorm"),
        "norm",
        rms_norm(lambda norm: 1 + norm.weight, "eps"),
        after=lambda logit, config: torch.tanh(logit / config.final_logit_softcapping)
        * config.final_logit_softcapping,
        transforms=("div", "tanh", "mul"),
    ),
    "granite": Wiring(
        *LIKE_LLAMA,
        ("self_attn", "mlp"),
        "norm",
        rms_norm(lambda norm: norm.weight, "variance_epsilon"),
        embed_scale=lambda config: config.embedding_multiplier,
        write_scale=lambda config: config.residual_multiplier,
        after=lambda logit, config: logit / config.logits_scaling,
        transforms=("div",),
    ),
    "cohere": Wiring(
        *LIKE_LLAMA,
        ("self_attn", "mlp"),
        "norm",
        layer_norm("variance_epsilon"),
        after=lambda logit, config: logit * config.logit_scale,
        transforms=("mul",),
    ),
}  # fmt: skip


def ours(model: nn.Module, inputs: dict[str, Any], tokens: list[int]) -> Attribution:
    found = find_stream(model, inputs)
    books, seen = ledger_and_tail(model, inputs, found)
    assert seen.tail is not None
    sequence, position = PLACE
    return attribute(
        books, seen.tail, seen.output[found.output], tokens, sequence=sequence, position=position
    )


def by_hooks(
    model: Any, inputs: dict[str, Any], wiring: Wiring, tokens: list[int]
) -> tuple[dict[str, Tensor], Tensor]:
    """Each component's part of each token's logit, and the model's own logits."""
    body = model.get_submodule(wiring.body)
    seen: dict[str, Tensor] = {}
    handles = []

    def keep(label: str, module: nn.Module, scale: float) -> None:
        def hook(_: Any, __: Any, out: Any) -> None:
            seen[label] = (out[0] if isinstance(out, tuple) else out) * scale

        handles.append(module.register_forward_hook(hook))

    keep("embed", body.get_submodule(wiring.embed), wiring.embed_scale(model.config))
    if wiring.positions is not None:
        keep("pos_embed", body.get_submodule(wiring.positions), 1.0)
    for i, block in enumerate(body.get_submodule(wiring.blocks)):
        for kind, name in zip(("attn", "mlp"), wiring.writes, strict=True):
            keep(f"{i}_{kind}_out", block.get_submodule(name), wiring.write_scale(model.config))
    with torch.no_grad():
        logits = model(**inputs).logits[PLACE][tokens]
    for handle in handles:
        handle.remove()
    at = {label: t.expand(2, *t.shape[1:])[PLACE] for label, t in seen.items()}
    rows = torch.stack(list(at.values()))
    with torch.no_grad():
        normed, bias = wiring.apply(body.get_submodule(wiring.norm), rows, rows.sum(0))
        head = model.get_output_embeddings()
        parts = normed @ head.weight[tokens].T
        rest = bias @ head.weight[tokens].T + (0.0 if head.bias is None else head.bias[tokens])
    return {**dict(zip(at, parts, strict=True)), "bias": rest}, logits


@pytest.mark.parametrize("name", WIRINGS)
def test_every_part_is_that_of_the_formula(name: str) -> None:
    torch.manual_seed(0)
    case, wiring = CASES[name], WIRINGS[name]
    model, inputs, tokens = case.build().double(), case.inputs(), [3, 41]
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20.0)  # so that a soft-cap bends
    found = ours(model, inputs, tokens)
    parts, logits = by_hooks(model, inputs, wiring, tokens)
    assert set(found.labels) == set(parts)
    for label, part in zip(found.labels, found.parts, strict=True):
        torch.testing.assert_close(part, parts[label], rtol=wiring.rounding, atol=wiring.rounding, msg=label)
    near = {"rtol": wiring.rounding, "atol": wiring.rounding}
    before = torch.stack(list(parts.values())).sum(0)
    torch.testing.assert_close(found.parts.sum(0), before, **near)
    torch.testing.assert_close(found.before, before, **near)
    torch.testing.assert_close(found.after, logits, **near)
    torch.testing.assert_close(wiring.after(before, model.config), logits, **near)
    assert found.transforms == wiring.transforms
    assert found.check(1e-12) is found


def test_a_soft_cap_bends_the_sum() -> None:
    """Gemma 2: what was summed is not what comes out, and both are the model's own (TransformerLens #828)."""
    torch.manual_seed(0)
    model = CASES["gemma2"].build().double()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20.0)
    found = ours(model, CASES["gemma2"].inputs(), [3, 41])
    assert float((found.before - found.after).abs().max()) > 0.01
    torch.testing.assert_close(found.after_sum, found.after, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "culprit"), [("bert", "gelu"), ("albert", "pow"), ("dinov2", "through no head")]
)
def test_a_head_that_is_not_linear_gets_no_figure(name: str, culprit: str) -> None:
    case = CASES[name]
    with pytest.raises(StreamNotFoundError, match=culprit):
        ours(case.build(), case.inputs(), [0])


def test_what_a_tail_writes_itself_is_no_bias() -> None:
    """``W (h + tanh h)``: no sum over the rows of h, though the frozen tanh would make the numbers fit."""
    calls = [
        Taped(torch.tanh, (Slot(0),), {}, [1]),
        Taped(torch.add, (Slot(0), Slot(1)), {}, [2]),
        Taped(nn.functional.linear, (Slot(2), torch.randn(5, 3)), {}, [3]),
    ]
    rows = torch.randn(2, 1, 4, 3)
    books = Ledger(("embed", "0_mlp_out"), rows, rows.sum(0), rows[0], torch.ones(1, 4, dtype=torch.bool))
    tail = Tail(calls, 3, (1, 4, 3))
    with pytest.raises(StreamNotFoundError, match="'tanh', which is not linear"):
        attribute(books, tail, tail(books.final), [0], sequence=0, position=2)


def test_a_token_that_is_not_there() -> None:
    case = CASES["llama"]
    with pytest.raises(ConfigError, match="token 100 has no logit; the model has 100"):
        ours(case.build(), case.inputs(), [3, 100])


def test_a_part_that_is_lost_is_noticed() -> None:
    case = CASES["llama"]
    found = ours(case.build(), case.inputs(), [3])
    lost = dataclasses.replace(found, parts=found.parts[:-2])
    with pytest.raises(BooksError, match="differ from the model's own logits"):
        lost.check(1e-5)
    assert not dataclasses.replace(found, parts=found.parts * torch.nan).error <= 1e-5
    found.check(1e-5)
