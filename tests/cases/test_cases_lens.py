"""Public reports about lenses: the wrong scale, the wrong cap, a test that only looked at the best word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from seen import see
from small_models import base, shake, tokens
from torch import Tensor, nn

from mainstem.measure import LogitLens
from mainstem.observe import KeepStream, Ledger, find_stream, ledger, record

F32 = {"rtol": 1e-4, "atol": 1e-5}


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def layer_norm(x: Tensor, norm: Any) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    return scaled * norm.weight.double() + (0 if norm.bias is None else norm.bias.double())


# The ends of models, written down again in fp64 from their sources.
ENDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "llama": lambda m, x: rms(x, m.model.norm.weight.double(), 1e-6) @ m.lm_head.weight.double().T,
    "gpt2": lambda m, x: layer_norm(x, m.transformer.ln_f) @ m.lm_head.weight.double().T,
    "granite": lambda m, x: rms(x, m.model.norm.weight.double(), 1e-6) @ m.lm_head.weight.double().T / 3.0,
    "cohere": lambda m, x: (
        layer_norm(x, _Plain(m.model.norm)) @ m.lm_head.weight.double().T * m.config.logit_scale
    ),
    "gemma2": lambda m, x: _capped(gemma2_raw(m, x), m.config.final_logit_softcapping),
}


class _Plain:
    """Cohere's norm: a weight, no bias."""

    def __init__(self, norm: Any):
        self.weight, self.bias, self.eps = norm.weight, None, norm.variance_epsilon


def gemma2_raw(model: Any, x: Tensor) -> Tensor:
    return rms(x, 1 + model.model.norm.weight.double(), 1e-6) @ model.lm_head.weight.double().T


def _capped(z: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(z / cap)


# TransformerLens#1076: the final scale at every layer -----------------------------------------------------


@pytest.mark.parametrize("name", ENDS)
def test_every_state_is_normed_with_its_own_scale(name: str) -> None:
    """TransformerLens#1076, #523: every layer was normed with the final layer's scale, so that the first
    one's prediction came out flat (15.6 bits instead of 0.5). Logits at every state, against the model's end
    written down again."""
    seen = see(name)
    states = [seen.kept["resid_pre", i] for i in range(4)] + [seen.kept["resid_post", 3]]
    tail = seen.recording.tail
    assert tail is not None
    with torch.no_grad():
        for state in states:
            expected = ENDS[name](seen.model, state.double())
            torch.testing.assert_close(tail(state).double(), expected, **F32)
        assert torch.equal(tail(states[-1]), seen.recording.output.logits)
        sizes = [state.double().pow(2).mean(-1, keepdim=True).sqrt() for state in (states[0], states[-1])]
        wrong = ENDS[name](seen.model, states[0].double()) * sizes[0] / sizes[1]
        assert not torch.allclose(tail(states[0]).double(), wrong, **F32)  # the final scale would show


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "cohere", "granite", "bert", "opt"])
def test_the_lens_at_the_last_state_is_the_model(name: str) -> None:
    """The same fault as a figure: the lens ends at the model's own prediction exactly, and the early states'
    do not (their entropy is what it is, not that of a guess)."""
    seen, lens = see(name), LogitLens()
    assert seen.recording.tail is not None
    lens.begin_pass(seen.recording.output.logits, seen.recording.tail)
    with torch.no_grad():
        record(seen.model, seen.inputs, seen.map, [lens])
    states = lens.result().states
    assert (states[-1].kl.all, states[-1].reverse_kl.all, states[-1].top1.all) == (0.0, 0.0, 1.0)
    assert states[0].kl.all > 1e-6


# TransformerLens#828, #693, unsloth-zoo#593, Megatron-Bridge#4645: the soft-cap ---------------------------


def capped_gemma(cap: float) -> Any:
    """A Gemma 2 whose logits are large enough for its cap to bend them."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        **base(head_dim=16, num_key_value_heads=2), final_logit_softcapping=cap
    )
    model: Any = shake(transformers.Gemma2ForCausalLM(config))
    with torch.no_grad():
        model.lm_head.weight.mul_(30.0)
    return model


def attribution(model: Any, book: Ledger, final: Tensor) -> Tensor:
    """Each row's logits with the final norm's scale frozen, ``[component, batch, pos, vocab]``, fp64."""
    scale = (final.double().pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
    gain = 1 + model.model.norm.weight.double()
    return book.rows.double() / scale * gain @ model.lm_head.weight.double().T


@pytest.mark.parametrize("cap", [5.0, 30.0])
def test_a_soft_cap_is_in_the_lens_and_beyond_the_attribution(cap: float) -> None:
    """TransformerLens#828, #693, unsloth-zoo#593, Megatron-Bridge#4645: Gemma's cap was left out, or was
    ``x tanh(x / c)``; the best word is the same, so tests of it passed. The rows of the ledger add up to the
    logits before the cap, and the lens gives those after it."""
    model, inputs, kept = capped_gemma(cap), tokens(), KeepStream()
    stream_map = find_stream(model, inputs)
    with torch.no_grad():
        seen = record(model, inputs, stream_map, [kept], keep_tail=True)
        final = kept["resid_post", -1]
        rows = attribution(model, ledger(model, inputs, stream_map), final)
        raw, capped = rows.sum(0), seen.output.logits.double()
        torch.testing.assert_close(raw, gemma2_raw(model, final.double()), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(_capped(raw, cap), capped, rtol=1e-4, atol=1e-4)
        assert seen.tail is not None
        for block in range(4):
            state = kept["resid_pre", block]
            expected = _capped(gemma2_raw(model, state.double()), cap)
            torch.testing.assert_close(seen.tail(state).double(), expected, rtol=1e-4, atol=1e-4)
    wrong = (raw, raw * torch.tanh(raw / cap))
    assert all(float((w - capped).abs().max()) > 0.05 * cap for w in wrong)  # and a test of the best word
    assert torch.equal(raw.argmax(-1), capped.argmax(-1))  # would not have seen the first


def test_nothing_is_centred() -> None:
    """TransformerLens#693: centring the unembedding shifted all logits of a token. They are the model's."""
    model, inputs = capped_gemma(30.0), tokens()
    with torch.no_grad():
        seen = record(model, inputs, find_stream(model, inputs))
        assert torch.equal(seen.output.logits, model(**inputs).logits)
    assert float(seen.output.logits.mean(-1).abs().max()) > 0.01
    assert isinstance(model, nn.Module)
