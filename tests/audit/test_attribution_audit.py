"""The attribution of an audit: which token, where, and what it says where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import GPL, config, make, tokenizer

from mainstem.audit import run_audit
from mainstem.errors import ConfigError


def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()


def first_window() -> list[int]:
    return tokenizer()(GPL.read_text("utf-8"), add_special_tokens=False)["input_ids"][:16]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_two_best_tokens_where_the_first_window_scores_last(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path)
    found = run_audit(config(folder, only=("answer",), lens=False, pad_side="left", tokens=20)).attribution
    assert found is not None
    logits = logits_of(folder, first_window())[14]
    best, runner_up = logits.topk(2).indices.tolist()
    assert (found.position, found.token_id, found.against_id) == (14, best, runner_up)
    assert found.token == tokenizer().decode([best])
    assert found.before == pytest.approx(float(logits[best] - logits[runner_up]), abs=1e-5)
    assert found.after == found.before
    assert sum(p.logit for p in found.parts) == pytest.approx(found.before, abs=1e-5)
    writes = [(f"{i}_{kind}_out", i) for i in range(3) for kind in ("attn", "mlp")]
    front = [("embed", None), *([("pos_embed", None)] if name == "gpt2" else [])]
    assert [(p.label, p.block) for p in found.parts] == [*front, *writes, ("bias", None)]


@pytest.mark.parametrize(
    ("words", "pair"), [("e", ("e",)), ("e,a", ("e", "a")), (",", (",",)), (",,e", (",", "e"))]
)
def test_a_chosen_token_at_the_last_position(words: str, pair: tuple[str, ...], tmp_path: Path) -> None:
    folder = make("llama", tmp_path)
    found = run_audit(config(folder, only=("answer",), lens=False, attribute=words)).attribution
    assert found is not None
    ids = [tokenizer()(word, add_special_tokens=False)["input_ids"][0] for word in pair]
    logits = logits_of(folder, first_window())[15][ids]
    assert found.position == 15
    assert [found.token_id, found.against_id] == [*ids, None][:2]
    assert found.before == pytest.approx(float(logits[0] - logits[1:].sum()), abs=1e-5)


@pytest.mark.parametrize("words", ["no such token", "e,no such token", ""])
def test_what_is_not_one_token_is_refused(words: str, tmp_path: Path) -> None:
    folder = make("one_block", tmp_path)
    with pytest.raises(ConfigError, match="not one token, nor two"):
        run_audit(config(folder, attribute=words))


def test_a_word_is_asked_for_with_its_question_only() -> None:
    with pytest.raises(ConfigError, match="belongs to the question 'answer'"):
        config("any", attribute="e", only=("growth",))


def test_where_there_is_none_the_reason_is_given(tmp_path: Path) -> None:
    for name, reason in (("bert", "'gelu', which is not linear"), ("encoder", "no output head")):
        result = run_audit(config(make(name, tmp_path)))
        assert result.attribution is None
        assert [n for n in result.provenance["notes"] if n.startswith("attribution is null") and reason in n]


def test_what_norms_on_the_stream_carry_has_no_size(tmp_path: Path) -> None:
    """DeepNorm's embedding comes out 48 times as large as it went in, for the norms made it so."""
    by_name = {
        name: run_audit(config(make(name, tmp_path))) for name in ("deep_norm", "llama", "no_residual")
    }
    shares = {name: result.identity for name, result in by_name.items()}
    deep, plain, none = (shares[name] for name in ("deep_norm", "llama", "no_residual"))
    assert deep is not None
    assert plain is not None
    assert none is not None
    assert deep.carried_share is deep.carried_share_first is None
    assert any("norms on the stream itself" in note for note in by_name["deep_norm"].provenance["notes"])
    assert deep.final_share is not None
    assert 0 < deep.final_share < 1
    assert plain.carried_share == plain.carried_share_first == pytest.approx(1.0, abs=1e-6)
    assert (none.carried_share, none.final_share) == (0.0, 0.0)
