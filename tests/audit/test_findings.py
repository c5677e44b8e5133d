"""Sentences on odd results: one block, nothing carried, no lens, nothing finite."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_models import config, make

from mainstem.audit import AuditResult, BlockFigures, run_audit
from mainstem.audit.findings import make_findings
from mainstem.audit.result import AttributedPart
from mainstem.errors import ConfigError
from mainstem.measure import ProbeBaseline, ProbeFigures, ProbeResult, Spectrum, StateSpectra


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> AuditResult:
    return run_audit(config(make("llama", tmp_path_factory.mktemp("findings"))))


def said(result: AuditResult) -> dict[int, str]:
    return {finding.number: finding.finding for finding in make_findings(result).findings}


def with_blocks(result: AuditResult, *changes: dict[str, Any]) -> AuditResult:
    blocks = [dataclasses.replace(b, **c) for b, c in zip(result.blocks, changes, strict=True)]
    return dataclasses.replace(result, blocks=blocks)


def with_outliers(result: AuditResult, values: list[float], massive: list[bool]) -> AuditResult:
    outliers = [
        dataclasses.replace(o, value=v, massive=m)
        for o, v, m in zip(result.outliers, values, massive, strict=True)
    ]
    blocks = [dataclasses.replace(b, max_abs=abs(v)) for b, v in zip(result.blocks, values, strict=True)]
    return dataclasses.replace(result, outliers=outliers, blocks=blocks)


def test_questions_have_the_house_words(llama: AuditResult) -> None:
    questions = [(f.number, f.question) for f in llama.findings]
    assert questions == [
        (1, "Do the books balance?"),
        (2, "How does the stream grow?"),
        (3, "What does each sublayer write?"),
        (4, "Is the word still there?"),
        (5, "When does the answer form?"),
        (7, "Which blocks can go?"),
        (8, "Do learning signals get down?"),
    ]
    everything = " ".join(f.question + f.finding for f in llama.findings)
    assert "floor" not in everything
    assert "elevator" not in everything
    assert all(f.finding.endswith(".") and "nan" not in f.finding for f in llama.findings)


def test_books_say_how_exact_they_are(llama: AuditResult) -> None:
    assert said(llama)[1].startswith("Yes, to the last bit, over 6 sublayers and 4 passes.")
    books = dataclasses.replace(llama.books, additivity=2e-7, passes=1)
    text = said(dataclasses.replace(llama, books=books))[1]
    assert text.startswith(
        "Yes: over 6 sublayers and 1 pass the largest relative error is 2.0e-07 in additivity"
    )


def test_the_most_that_bfloat16_would_swallow(llama: AuditResult) -> None:
    shares = [
        {"absorbed_bfloat16": {"attn": {"rest": 0.01, "first": first}, "mlp": {"rest": 0.03, "first": 0.0}}}
        for first in (0.1, 0.74, math.nan)
    ]
    text = said(with_blocks(llama, *shares))[1]
    assert "swallow 2.0% of the write entries on average" in text
    assert "and up to 74% of a write at the windows' first tokens (block 1, attention)" in text
    none = {"absorbed_bfloat16": {"attn": {"rest": math.nan, "first": 0.5}}}
    assert "would swallow up to 50% of a write" in said(with_blocks(llama, none, none, none))[1]


def test_one_block(tmp_path: Path) -> None:
    found = said(run_audit(config(make("one_block", tmp_path))))
    assert "goes from" not in found[2]
    assert "a block;" not in found[2]
    assert "most" not in found[3]
    assert found[5].startswith("There is one block")
    assert found[7].startswith("There is one block; its influence")


def test_nothing_carried_and_no_lens(tmp_path: Path) -> None:
    assert said(run_audit(config(make("no_residual", tmp_path))))[3] == (
        "Nothing is carried: each sublayer replaces the stream."
    )
    assert set(said(run_audit(config(make("encoder", tmp_path))))) == {1, 2, 3, 4, 7}


def test_nothing_finite(llama: AuditResult) -> None:
    names = [f.name for f in dataclasses.fields(BlockFigures)]
    floats = {n: math.nan for n in names if isinstance(getattr(llama.blocks[0], n), float)}
    nested = {"headroom_bits": dict.fromkeys(llama.blocks[0].headroom_bits, math.nan)}
    nested["absorbed_bfloat16"] = {"attn": {"rest": math.nan, "first": math.nan}}
    result = with_blocks(llama, *[{**floats, **nested}] * 3)
    outliers = [dataclasses.replace(o, value=math.nan, median_ratio=math.nan) for o in llama.outliers]
    best = [{**b, "distance": math.nan} for b in llama.angular_distance.best]
    result = dataclasses.replace(
        result,
        attribution=None,
        spectra=None,
        outliers=outliers,
        angular_distance=dataclasses.replace(llama.angular_distance, best=best),
        first_nonfinite={"block": 1, "site": "attn[0]", "sequence": 0, "position": 3, "token_id": 5},
    )
    found = said(result)
    assert "NOT FINITE from block 1 (attn[0]) on" in found[1]
    assert "swallow" not in found[1]
    assert set(found) == {1, 2}
    assert found[2] == "The median norm goes from nan after block 0 to nan after block 2."


def test_massive_activations_and_the_blocks_that_make_them(llama: AuditResult) -> None:
    text = said(with_outliers(llama, [5.0, -9000.0, 8000.0], [False, True, True]))
    assert "the largest activation is -9,000" in text[2]
    assert "massive after blocks 1-2." in text[2]
    assert "block 1 creates or erases a massive activation" in text[7]
    text = said(with_outliers(llama, [9000.0, 5.0, 9000.0], [True, False, True]))
    assert "massive after blocks 0, 2." in text[2]
    assert "blocks 1-2 create or erase" in text[7]
    assert "massive" not in said(with_outliers(llama, [90.0, 5.0, 90.0], [False] * 3))[7]


@pytest.mark.parametrize(
    ("top1", "where"),
    [
        ((0.6, 0.7, 1.0), "from block 0 of 3 on"),
        ((0.6, 0.4, 1.0), "only after the last block"),
        ((0.1, 0.5, 1.0), "from block 1 of 3 on"),
    ],
)
def test_when_the_answer_forms(llama: AuditResult, top1: tuple[float, ...], where: str) -> None:
    text = said(with_blocks(llama, *({"lens_top1": share, "lens_kl": 1.25} for share in top1)))[5]
    assert where in text
    assert "1.25 nats" in text
    assert f"{100 * top1[1]:.0f}% of the top words agree" in text


def test_who_writes_against_the_stream(llama: AuditResult) -> None:
    text = said(with_blocks(llama, *({"write_cosine": c} for c in (0.1, -0.1, 0.0))))[3]
    assert "; block 1 writes against the stream (cosine below 0)." in text
    text = said(with_blocks(llama, *({"write_cosine": c} for c in (-0.1, 0.1, -0.2))))[3]
    assert "; blocks 0, 2 write against the stream (cosine below 0)." in text


def test_the_blocks_of_least_influence_come_first(llama: AuditResult) -> None:
    text = said(with_blocks(llama, *({"block_influence": c} for c in (0.3, 0.1, 0.2))))[7]
    assert text.startswith("Least influence (1 - cosine): blocks 1, 2, 0;")


def test_the_word_and_the_signal(llama: AuditResult) -> None:
    assert llama.identity is not None
    shares = dataclasses.replace(
        with_blocks(llama, *({"nearest_embedding": s, "gradient_norm": g} for s, g in SHARES)),
        identity=dataclasses.replace(llama.identity, final_share=0.25),
    )
    found = said(shares)
    assert "100% of 12 positions before block 0, 75% after it and 25% after the last block" in found[4]
    assert found[4].endswith(
        "; below half first after block 2 (always naming the commonest token: 33%); "
        "100% of the embedding is carried to the top, and is 25% of the final state."
    )
    assert found[8].endswith("it is largest after block 1 (9).")


def test_an_embedding_that_is_amplified_or_has_no_size_of_its_own(llama: AuditResult) -> None:
    assert llama.identity is not None
    for carried, words in ((4.845, "; the embedding is carried to the top x4.84, and is"), (None, "; the")):
        identity = dataclasses.replace(llama.identity, carried_share=carried, final_share=-0.12)
        text = said(dataclasses.replace(llama, identity=identity))[4]
        assert words in text
        assert text.endswith(" is -12% of the final state.")


def test_whose_parts_of_a_logit_are_largest(llama: AuditResult) -> None:
    parts = [
        AttributedPart(label=label, block=None, logit=logit)
        for label, logit in (("embed", 0.5), ("0_attn_out", -3.0), ("0_mlp_out", 2.0), ("bias", 1.0))
    ]
    assert llama.attribution is not None
    capped = dataclasses.replace(
        llama.attribution, position=4, token="a", against="b", before=0.5, after=0.25, parts=parts
    )
    capped = dataclasses.replace(capped, transforms=("div", "tanh", "mul"))
    text = said(dataclasses.replace(llama, attribution=capped))[5]
    assert text.endswith(
        " At position 4 'a' over 'b' is +0.5 logits (+0.25 after div, tanh, mul), the sum of 4 parts: "
        "0_attn_out -3, 0_mlp_out +2, bias +1, the others +0.5."
    )
    alone = dataclasses.replace(capped, against=None, against_id=None, transforms=())
    text = said(dataclasses.replace(llama, attribution=alone))[5]
    assert " At position 4 the logit of 'a' is +0.5 logits, the sum of 4 parts:" in text


def cloud(state: int, ratio: float, typical: float, cka: float, typical_cka: float) -> StateSpectra:
    spectra = [Spectrum(r, 350.0, r, r, 100 - 3 * (r != ratio)) for r in (ratio, typical)]
    return StateSpectra(state, *spectra, cka, cka, typical_cka, typical_cka)


def test_directions_and_the_least_alike(llama: AuditResult) -> None:
    spectra = [
        cloud(0, 11, 11, 0.9, 0.9),
        cloud(1, 2.4, 29.2, 0.32, 0.76),
        cloud(3, 12, 12, math.nan, math.nan),
    ]
    found = said(dataclasses.replace(llama, spectra=spectra))
    assert found[2].endswith(
        " Its tokens spread over 11 directions before block 0 and 12 after the last block (participation "
        "ratio; effective rank 350 and 350), over the fewest of the states looked at before block 1: 2.4 "
        "(29.2 without 3 outlier tokens)."
    )
    assert found[3].endswith(
        " Of the states looked at the least alike neighbours are those before block 1 and after the last "
        "block (CKA 0.32; 0.76 without outlier tokens)."
    )
    nothing = [cloud(s, math.nan, math.nan, math.nan, math.nan) for s in (0, 3)]
    found = said(dataclasses.replace(llama, spectra=nothing))
    assert "directions" not in found[2]
    assert "CKA" not in found[3]


def test_what_a_probe_names(llama: AuditResult) -> None:
    shares = {(0, 0): (1.0, 0.9), (0, 1): (0.2, 0.0), (3, 0): (0.55, 0.05), (3, 1): (0.18, 0.0)}
    probe = ProbeResult(
        figures=tuple(ProbeFigures(s, o, text, types, 0.1) for (s, o), (text, types) in shares.items()),
        baselines=(ProbeBaseline(0, 0.04, 0.1, math.nan), ProbeBaseline(1, 0.04, 0.1, 0.17)),
        num_train=900,
        num_text=90,
        num_types=10,
    )
    text = said(dataclasses.replace(llama, probe=probe))[4]
    assert text.endswith(
        " On held-out text a linear probe of the stream before block 0 and after the last block names the "
        "token in place at 100% and 55% (commonest token 4.0%; words it was not trained on 90% and 5.0%), "
        "the one before it at 20% and 18% (commonest token 4.0%, bigram 17%)."
    )


SHARES = ((0.75, 2.0), (0.5, 9.0), (0.25, 1.0))


def test_only_what_is_asked_is_looked_for(tmp_path: Path) -> None:
    result = run_audit(config(make("llama", tmp_path), only=("growth", "signals")))
    assert [f.number for f in result.findings] == [2, 8]
    assert result.identity is None
    assert result.effective_depth is None
    with pytest.raises(ConfigError, match="there is no question 'grows'"):
        config(tmp_path, only=("grows",))


def test_a_share_that_rounds_to_zero_has_no_sign(llama: AuditResult) -> None:
    assert llama.identity is not None
    almost_none = dataclasses.replace(llama.identity, final_share=-0.0001)
    assert "is 0.0% of the final state" in said(dataclasses.replace(llama, identity=almost_none))[4]
