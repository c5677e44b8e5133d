"""One sentence close up, against the same figures from plain hooks and closed forms, in fp64."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make
from torch import Tensor

from mainstem.audit.close_up import (
    LENS_GRIDS,
    Subject,
    compare_words,
    damage,
    look,
    see,
    token_tower,
    word_position,
)
from mainstem.audit.close_up_jobs import damage_matrix, gradients
from mainstem.errors import ConfigError
from mainstem.intervene import Intervention, Noise, Place, Scale, Skip, Zero
from mainstem.sources import load_model

CLOSE: dict[str, float] = {"rtol": 1e-10, "atol": 1e-11}
FP32_NORM = 1e-7
"""Llama's norm rounds to fp32 in a model of fp64: logits of size 1 are off by a unit of it."""
TEXT = "You may copy the work and give it away."
BREAKS: dict[str, Intervention] = {
    "skip": Skip(blocks=[1]),
    "zero": Zero(blocks=[1], part="attn"),
    "scale": Scale(blocks=[1], part="mlp", factor=-0.5),
    "noise": Noise(blocks=[1], part="mlp", size=2.0, seed=3),
    "two": Skip(blocks=[0, 2]),
}


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Subject]:
    """A tiny model by its wiring, in fp64."""

    @functools.cache
    def made(name: str, dtype: str = "float64") -> Subject:
        folder = make(name, tmp_path_factory.mktemp(name))
        return Subject(load_model(folder, dtype=dtype), max_tokens=40)

    return made


class Plain:
    """A Llama run with forward hooks alone: its states, writes and logits."""

    def __init__(self, subject: Subject, text: str, broken: Intervention | None = None):
        self.model = subject.model
        ids = subject.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.ids = torch.tensor([ids])
        self.whole: list[Tensor] = []
        self.attn: list[Tensor] = []
        self.mlp: list[Tensor] = []
        with self._hooks(broken):
            self.logits = self.model(input_ids=self.ids, use_cache=False).logits[0]

    @property
    def states(self) -> Tensor:
        return torch.cat(self.whole)

    @contextmanager
    def _hooks(self, broken: Intervention | None) -> Generator[None]:
        handles: list[Any] = []
        layers = self.model.model.layers

        def keep(store: list[Tensor], block: int, part: str) -> Callable[..., Any]:
            def hook(_m: Any, args: Any, out: Any) -> Any:
                value = out[0] if isinstance(out, tuple) else out
                if broken is not None and block in broken.blocks and broken.part == part:
                    if part == "block":
                        return args[0]
                    changed = broken.change(value, Place(block, part, int(part == "mlp")))
                    store.append(changed[0])
                    return (changed, *out[1:]) if isinstance(out, tuple) else changed
                store.append(value[0])
                return None

            return hook

        def enter(_m: Any, args: Any) -> None:
            self.whole.append(args[0])

        for i, layer in enumerate(layers):
            handles += [
                layer.register_forward_pre_hook(enter),
                layer.self_attn.register_forward_hook(keep(self.attn, i, "attn")),
                layer.mlp.register_forward_hook(keep(self.mlp, i, "mlp")),
                layer.register_forward_hook(keep([], i, "block")),
            ]
        handles.append(self.model.model.norm.register_forward_pre_hook(enter))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def by_hand_lens(plain: Plain) -> Tensor:
    return plain.model.lm_head(plain.model.model.norm(plain.states))


def test_states_writes_and_predictions_are_those_of_plain_hooks(subject: Callable[..., Subject]) -> None:
    llama = subject("llama")
    with torch.no_grad():
        plain, seen = Plain(llama, TEXT), see(llama, TEXT)
        lens = by_hand_lens(plain)
    assert torch.equal(seen.states, plain.states)
    writes = torch.stack([w for pair in zip(plain.attn, plain.mlp, strict=True) for w in pair])
    assert torch.equal(seen.writes, writes)
    assert torch.equal(seen.logits if seen.logits is not None else lens, plain.logits)
    shown = look(seen, position=-2)
    assert shown.position == len(seen.ids) - 2
    chances = plain.logits[-2].softmax(-1)
    assert [w.id for w in shown.predictions] == chances.topk(5).indices.tolist()
    assert [w.probability for w in shown.predictions] == pytest.approx(chances.topk(5).values.tolist())
    assert [w.text for w in shown.predictions] == [llama.tokenizer.decode([w.id]) for w in shown.predictions]
    log_p = plain.logits.log_softmax(-1)
    own = log_p.exp()
    kl = (own * (log_p - lens.log_softmax(-1))).sum(-1)
    best = plain.logits.argmax(-1)
    chance = lens.softmax(-1).gather(-1, best.expand(4, -1)[..., None])[..., 0]
    np.testing.assert_allclose(shown.grids["lens_kl"], kl.numpy(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(shown.grids["lens_probability"], chance.numpy(), rtol=1e-6)
    assert np.array_equal(shown.grids["lens_top"], lens.argmax(-1).numpy())
    assert [s.kl for s in shown.lens] == pytest.approx(kl[:, -2].tolist(), abs=1e-12)
    assert [s.probability for s in shown.lens] == pytest.approx(chance[:, -2].tolist())
    ranks = [int((row > row[best[-2]]).sum()) for row in lens[:, -2]]
    assert [s.rank for s in shown.lens] == ranks
    assert shown.lens[-1].top == shown.predictions
    losses = torch.nn.functional.cross_entropy(plain.logits[:-1], plain.ids[0, 1:], reduction="none")
    assert math.isnan(shown.loss_by_token[0])
    assert shown.loss_by_token[1:] == pytest.approx(losses.tolist())
    assert shown.loss == pytest.approx(float(losses.mean()))
    assert set(shown.vocabulary) == set(lens.argmax(-1).flatten().tolist())


def test_figures_of_states_and_writes_are_the_formulas(subject: Callable[..., Subject]) -> None:
    llama = subject("llama")
    with torch.no_grad():
        plain, shown = Plain(llama, TEXT), look(see(llama, TEXT))
    x = plain.states
    cosine = torch.nn.functional.cosine_similarity
    size, turn = list[Tensor](), list[Tensor]()
    for i in range(3):
        mid = x[i] + plain.attn[i]
        for write, before in ((plain.attn[i], x[i]), (plain.mlp[i], mid)):
            size.append(write.norm(dim=-1) / before.norm(dim=-1))
            turn.append(cosine(write, before, dim=-1))
    count = x.shape[1]
    pairs = cosine(x[:, :, None], x[:, None], dim=-1)
    expected = {
        "norm": x.norm(dim=-1),
        "write_size": torch.stack(size),
        "write_cosine": torch.stack(turn),
        "cosine_first": cosine(x, x[:1], dim=-1),
        "token_cosine": pairs,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(shown.grids[name], value.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(shown.grids["cosine_before"][1:], cosine(x[1:], x[:-1], dim=-1), rtol=1e-5)
    assert np.isnan(shown.grids["cosine_before"][0]).all()
    apart = [float(p[~torch.eye(count, dtype=torch.bool)].mean()) for p in pairs]
    assert shown.token_cosine == pytest.approx(apart)
    rest = expected["norm"][:, 1:]
    assert [s.median for s in shown.norm] == pytest.approx(rest.quantile(0.5, 1).tolist())
    assert [s.low for s in shown.norm] == pytest.approx(rest.quantile(0.05, 1).tolist())
    assert [s.high for s in shown.norm] == pytest.approx(rest.quantile(0.95, 1).tolist())
    assert [s.first for s in shown.norm] == pytest.approx(x[:, 0].norm(dim=-1).tolist())


@pytest.mark.parametrize("broken", [None, *BREAKS])
def test_the_tower_is_the_logit_write_by_write(subject: Callable[..., Subject], broken: str | None) -> None:
    """Against the closed form of an RMSNorm with its scale frozen, of whole and broken passes."""
    llama = subject("llama")
    one = BREAKS[broken] if broken else None
    with torch.no_grad():
        plain, seen = Plain(llama, TEXT, one), see(llama, TEXT, one)
    norm, head = llama.model.model.norm, llama.model.lm_head.weight.detach()
    top = plain.states[-1, 5]
    scale = norm.weight.detach() * (top.square().mean() + norm.variance_epsilon).rsqrt()
    word, other = (int(i) for i in plain.logits[5].topk(2).indices)
    for against in (None, other):
        towers = token_tower(seen, 5, against=against)
        assert towers.meaning is not None
        assert (towers.word and towers.word.id) == word
        direction = scale * (head[word] - (0 if against is None else head[against]))
        logit = float(plain.logits[5, word] - (0 if against is None else plain.logits[5, against]))
        assert towers.meaning.parts[-1].running == pytest.approx(logit, abs=FP32_NORM)
        assert sum(p.logit for p in towers.meaning.parts) == pytest.approx(logit, abs=FP32_NORM)
        assert towers.meaning.logit == towers.meaning.shown_logit == pytest.approx(logit, abs=FP32_NORM)
        found = {p.label: p.logit for p in towers.meaning.parts}
        assert found["embed"] == pytest.approx(float(plain.states[0, 5] @ direction), abs=FP32_NORM)
        assert found["2_mlp_out"] == pytest.approx(float(seen.writes[5, 5] @ direction), abs=FP32_NORM)
        assert ("intervention" in found) == (one is not None)
        largest = sorted(found, key=lambda label: -abs(found[label]))[:8]
        assert list(towers.meaning.top) == largest
    assert token_tower(seen, 5).norm == pytest.approx(plain.states[:, 5].norm(dim=-1).tolist())


@pytest.mark.parametrize("broken", list(BREAKS))
def test_a_broken_pass_is_that_of_plain_hooks(subject: Callable[..., Subject], broken: str) -> None:
    llama = subject("llama")
    with torch.no_grad():
        whole, plain = Plain(llama, TEXT), Plain(llama, TEXT, BREAKS[broken])
        seen, changed = see(llama, TEXT), see(llama, TEXT, BREAKS[broken])
    torch.testing.assert_close(changed.states, plain.states, **CLOSE)
    found = damage(seen, changed)
    norms = (plain.states - whole.states).norm(dim=-1) / whole.states.norm(dim=-1)
    assert [c.mean for c in found.change] == pytest.approx(norms.mean(1).tolist(), abs=1e-12)
    assert [c.rest for c in found.change] == pytest.approx(norms[:, 1:].mean(1).tolist(), abs=1e-12)
    log_p, log_q = whole.logits.log_softmax(-1), plain.logits.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert found.kl_by_token == pytest.approx(kl.tolist(), abs=1e-12)
    assert found.kl == pytest.approx(float(kl.mean()), abs=1e-12)
    same = whole.logits.argmax(-1) == plain.logits.argmax(-1)
    assert found.top1_by_token == tuple(same.tolist())
    cross = torch.nn.functional.cross_entropy
    assert found.loss_broken == pytest.approx(float(cross(plain.logits[:-1], plain.ids[0, 1:])))
    assert found.loss == pytest.approx(float(cross(whole.logits[:-1], plain.ids[0, 1:])))
    assert found.first_changed == min(BREAKS[broken].blocks) + 1
    assert found.predictions_broken[0].id == int(plain.logits[-1].argmax())


@pytest.mark.parametrize("kind", ["skip", "noise"])
def test_the_matrix_is_that_of_full_passes(subject: Callable[..., Subject], kind: str) -> None:
    llama = subject("llama")

    def broken(block: int) -> Intervention:
        return Skip(blocks=[block]) if kind == "skip" else Noise(blocks=[block], part="mlp", size=1.0)

    told: list[tuple[int, int]] = []
    found = damage_matrix(llama, TEXT, broken, lambda done, total: told.append((done, total)))
    assert found.finished
    assert found.restarted
    assert told == [(i, 4) for i in range(1, 5)]
    with torch.no_grad():
        whole = Plain(llama, TEXT)
        for block in range(3):
            plain = Plain(llama, TEXT, broken(block))
            change = ((plain.states - whole.states).norm(dim=-1) / whole.states.norm(dim=-1))[:, 1:].mean(1)
            above = slice(block + 1, None)
            np.testing.assert_allclose(found.change[block][above], change[above].numpy(), rtol=1e-6)
            assert np.isnan(found.change[block][: block + 1]).all()
            log_p, log_q = whole.logits.log_softmax(-1), plain.logits.log_softmax(-1)
            assert found.kl[block] == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()))
    assert math.isnan(found.incoming[0])
    assert found.incoming[1:] == pytest.approx(np.nanmax(found.change[:, 1:], 0).tolist())


def test_a_matrix_that_is_stopped_keeps_what_was_done(subject: Callable[..., Subject]) -> None:
    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    found = damage_matrix(subject("llama"), TEXT, lambda b: Skip(blocks=[b]), stop)
    assert (found.finished, found.passes) == (False, 3)
    assert np.isfinite(found.change[1, 2:]).all()
    assert np.isnan(found.change[2]).all()
    assert math.isnan(found.kl[2])


def test_gradients_are_those_that_autograd_keeps(subject: Callable[..., Subject]) -> None:
    llama = subject("llama")
    found = gradients(llama, TEXT)
    with torch.enable_grad():
        plain = Plain(llama, TEXT)
        loss = torch.nn.functional.cross_entropy(plain.logits[:-1], plain.ids[0, 1:], reduction="sum")
        own = torch.autograd.grad(loss, plain.whole[0])[0][0]
        count = len(plain.ids[0]) - 1
    np.testing.assert_allclose(found.norm[0], own.norm(dim=-1).numpy(), **CLOSE)
    assert found.loss == pytest.approx(float(loss.detach()) / count)
    assert all(p.grad is None for p in llama.model.parameters())
    # the last state's gradient in closed form: dL/dlogits through the head and the norm
    top = plain.whole[-1][0].detach().requires_grad_()
    logits = llama.model.lm_head(llama.model.model.norm(top))
    again = torch.nn.functional.cross_entropy(logits[:-1], plain.ids[0, 1:], reduction="sum")
    np.testing.assert_allclose(found.norm[-1], torch.autograd.grad(again, top)[0].norm(dim=-1), **CLOSE)
    ratio = found.norm[0, 1:].mean() / found.norm[-1, 1:].mean()
    assert found.bottom_to_top == pytest.approx(float(ratio))


def test_two_sentences_part_where_their_words_do(subject: Callable[..., Subject]) -> None:
    llama = subject("llama")
    a, b = see(llama, "copy the work and give"), see(llama, "under the work and give")
    i, j = word_position(a, "work"), word_position(b, "work")
    found = compare_words(a, b, (i, j))
    with torch.no_grad():
        x, y = (Plain(llama, s.text).states[:, p] for s, p in ((a, i), (b, j)))
    assert found.cosine == pytest.approx(torch.nn.functional.cosine_similarity(x, y, dim=-1).tolist())
    gap = 2 * (x - y).norm(dim=-1) / (x.norm(dim=-1) + y.norm(dim=-1))
    assert found.distance == pytest.approx(gap.tolist(), abs=1e-12)
    assert found.first_apart == 1  # the same word at the bottom
    assert found.distance[0] == 0.0
    assert found.lens[0] == look(a, i).lens


def test_a_words_place_is_its_last_token(subject: Callable[..., Subject]) -> None:
    seen = see(subject("llama"), "copywork and a work, zq zqzq")
    for word in ("work", "copywork", "zqzq", "zq"):
        place = word_position(seen, word)
        text = seen.subject.tokenizer.decode(list(seen.ids[: place + 1]))
        shorter = seen.subject.tokenizer.decode(list(seen.ids[:place]))
        whole = seen.text.index(" work") + 5 if word == "work" else seen.text.index(word) + len(word)
        assert len(shorter) < whole <= len(text)
    with pytest.raises(ConfigError, match="'absent' is not in the sentence"):
        word_position(seen, "absent")


@pytest.mark.parametrize(
    "name", ["gpt2", "tower", "no_residual", "deep_norm", "four_streams", "neox_parallel"]
)
def test_every_wirings_tower_adds_up_whole_and_broken(subject: Callable[..., Subject], name: str) -> None:
    made = subject(name, "float32" if name == "four_streams" else "float64")  # its experts know no fp64
    close = 1e-5 if name == "four_streams" else 1e-9
    for one in (None, Skip(blocks=[1]), Noise(blocks=[1], part="mlp", size=0.5)):
        seen = see(made, TEXT, one)
        towers = token_tower(seen)
        assert towers.meaning is not None, towers.why_no_meaning
        assert sum(p.logit for p in towers.meaning.parts) == pytest.approx(towers.meaning.logit, abs=close)
        if one is None:
            with torch.no_grad():
                logits = made.model(input_ids=torch.tensor([seen.ids])).logits[0, -1]
            assert towers.meaning.shown_logit == pytest.approx(float(logits.max()), abs=close)
        shown = look(seen)
        assert shown.lens[-1].kl == pytest.approx(0, abs=close)
        assert shown.lens[-1].top == shown.predictions
    if name == "no_residual":
        assert all(math.isnan(s) for s in token_tower(see(made, TEXT)).write_size)


@pytest.mark.parametrize("name", ["bert", "encoder"])
def test_what_is_not_there_is_left_out_with_the_reason(subject: Callable[..., Subject], name: str) -> None:
    made = subject(name)
    seen = see(made, TEXT)
    shown = look(seen)
    assert (len(shown.predictions), len(shown.lens)) == ((5, 4) if name == "bert" else (0, 0))
    assert math.isnan(shown.loss)
    assert set(LENS_GRIDS) & set(shown.grids) == (set(LENS_GRIDS) if name == "bert" else set())
    towers = token_tower(seen)
    assert towers.meaning is None
    assert ("gelu" if name == "bert" else "predicts no words") in towers.why_no_meaning
    with pytest.raises(ConfigError, match="no loss of a next token"):
        gradients(made, TEXT)
    json.dumps(shown.to_dict(), allow_nan=False)


def test_all_of_it_is_json_in_fp32(subject: Callable[..., Subject]) -> None:
    llama = subject("llama", "float32")
    seen = see(llama, TEXT)
    broken = see(llama, TEXT, BREAKS["noise"])
    for result in (look(seen), token_tower(broken), damage(seen, broken), compare_words(seen, broken)):
        json.dumps(result.to_dict(), allow_nan=False)
    json.dumps(damage_matrix(llama, TEXT, lambda b: Skip(blocks=[b])).to_dict(), allow_nan=False)
    json.dumps(gradients(llama, TEXT, BREAKS["scale"]).to_dict(), allow_nan=False)
    assert seen.additivity <= llama.tolerance
    assert broken.additivity <= 10 * llama.tolerance


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "has 0 token"), ("e", "has 1 token"), ("e f " * 200, "write one of 2 to 40 tokens")],
)
def test_sentences_that_are_too_short_or_too_long(
    subject: Callable[..., Subject], text: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        see(subject("llama"), text)


def test_mistakes_are_sentences(subject: Callable[..., Subject]) -> None:
    llama = subject("llama")
    seen = see(llama, TEXT)
    for mistake, says in (
        (lambda: see(llama, TEXT, Skip(blocks=[7])), "block 7"),
        (lambda: see(llama, TEXT, Zero(blocks=[0], part="mixer")), "no 'mixer'"),
        (lambda: look(seen, 99), "outside the sentence"),
        (lambda: look(seen, grids=["shoe"]), "no grid 'shoe'"),
        (lambda: token_tower(seen, token=10**6), "has no logit"),
        (lambda: damage(seen, see(llama, "another sentence")), "different models or sentences"),
        (lambda: compare_words(seen, see(subject("gpt2"), TEXT)), "different models"),
    ):
        with pytest.raises(ConfigError, match=says):
            mistake()
    with pytest.raises(ConfigError, match="cannot be merged"):
        seen.film.merge(seen.film)


def test_a_history_is_seen_but_not_broken(tmp_path: Path) -> None:
    from tiny_models import _tower, save

    torch.manual_seed(1)
    folder = save(_tower(connection="attention_residuals").eval(), tmp_path / "history")
    made = Subject(load_model(folder, dtype="float64"))
    seen = see(made, TEXT)
    with torch.no_grad():
        logits = made.model(input_ids=torch.tensor([seen.ids])).logits[0]
    assert seen.logits is not None
    torch.testing.assert_close(seen.logits, logits, **CLOSE)
    towers = token_tower(seen)
    assert towers.meaning is not None
    assert towers.meaning.parts[-1].running == pytest.approx(float(logits[-1].max()), abs=1e-9)
    for call in (
        lambda: see(made, TEXT, Skip(blocks=[0])),
        lambda: damage_matrix(made, TEXT, lambda b: Skip(blocks=[b])),
    ):
        with pytest.raises(ConfigError, match="known by its connections alone"):
            call()
