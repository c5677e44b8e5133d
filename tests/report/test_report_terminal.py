"""The table at any width: nothing cut, nothing wider than the terminal."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from mainstem.audit import AuditResult, BlockDamage, Damage
from mainstem.report import plain_console, print_pair, print_result


def printed(result: AuditResult, width: int) -> list[str]:
    out = io.StringIO()
    print_result(result, Console(file=out, width=width))
    return out.getvalue().splitlines()


@pytest.fixture
def large(llama: AuditResult) -> AuditResult:
    """96 blocks with figures as wide as real ones get."""
    blocks = [
        dataclasses.replace(
            llama.blocks[0],
            block=i,
            resid_norm_median=23754.3,
            resid_norm_first=-1e-5 if i % 2 else 1.234e7,
            mlp_write_ratio=12.976,
            write_cosine=-0.123,
            block_influence=0.9904,
            max_abs=25805.0,
            lens_kl=16.906,
        )
        for i in range(96)
    ]
    outliers = [
        dataclasses.replace(llama.outliers[0], block=i, position=2047, channel=12287, massive=True)
        for i in range(96)
    ]
    return dataclasses.replace(llama, blocks=blocks, outliers=outliers)


def table(lines: list[str]) -> list[list[str]]:
    begin = next(i for i, line in enumerate(lines) if line.lstrip().startswith("block "))
    rows = [line.split() for line in lines[begin:]]
    return rows[: next(i for i, row in enumerate(rows) if row[0] in ("means", "*", "left"))]


@pytest.mark.parametrize("width", [40, 60, 79, 80, 81, 100, 120, 200])
def test_every_line_fits_and_no_cell_is_cut(llama: AuditResult, large: AuditResult, width: int) -> None:
    for result in (llama, large):
        lines = printed(result, width)
        assert max(map(len, lines)) <= width
        assert not any("…" in line for line in lines)
        heads, *rows = table(lines)
        assert len(rows) == len(result.blocks)
        assert {len(row) for row in rows} == {len(heads)}
        assert {"block", "norm", "attn", "mlp", "infl."} <= set(heads)


def test_the_loss_without_a_block_stands_beside_its_influence(llama: AuditResult) -> None:
    parts = {"kl": 0.1, "top1": 0.9, "change": [0.1], "cosine": [0.9]}
    blocks = [BlockDamage(block=b, removal_loss=loss, **parts) for b, loss in ((0, 6.9877), (2, -0.012))]
    counts = {"windows": 1, "tokens": 16, "passes": 3, "restarted": True, "finished": False}
    none = {"influence_correlation": None, "angle_correlation": None, "plans": ()}
    result = dataclasses.replace(llama, damage=Damage(blocks=blocks, **counts, **none))
    lines = printed(result, 120)
    heads, *rows = table(lines)
    assert [row[heads.index("skip")] for row in rows] == ["6.988", "-", "-0.012"]
    assert heads.index("skip") == heads.index("infl.") + 1
    assert "skip: the loss without the block" in " ".join(lines)
    assert "skip" not in table(printed(llama, 120))[0]


def test_what_has_no_room_is_named(large: AuditResult) -> None:
    heads = table(printed(large, 200))[0]
    assert heads == [
        "block", "norm", "first", "attn", "mlp", "cos", "infl.", "angle", "max", "at", "KL", "top-1"
    ]  # fmt: skip
    narrow = printed(large, 60)
    gone = [head for head in heads if head not in table(narrow)[0]]
    assert gone
    said = " ".join(narrow).partition("left out for lack of room: ")[2]
    assert all(head in said for head in gone)
    assert "left out" not in " ".join(printed(large, 200))


def test_a_real_audit_fits_80_columns_with_all_it_has(llama: AuditResult) -> None:
    assert "left out" not in " ".join(printed(llama, 80))


def test_words_are_not_broken(llama: AuditResult) -> None:
    words = {word for f in llama.findings for word in f"{f.number} {f.question} {f.finding}".split()}
    lines = printed(llama, 50)
    found = lines[next(i for i, line in enumerate(lines) if line.startswith("1 Do the books")) :]
    assert [word for line in found for word in line.split() if word not in words] == []
    assert len(found) > 10


def test_the_first_token_policy_is_stated(llama: AuditResult) -> None:
    text = " ".join(printed(llama, 120))
    assert "nothing is added: each window begins with the text's own token" in text
    assert "leave out the first token of each window" in text


def test_names_are_no_markup(llama: AuditResult) -> None:
    model = {**llama.provenance["model"], "requested": "[bold]my[/red] model"}
    result = dataclasses.replace(llama, provenance={**llama.provenance, "model": model})
    assert printed(result, 120)[0].startswith("[bold]my[/red] model (LlamaForCausalLM")


def test_a_pipe_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert plain_console().width == 120


def test_two_audits_are_paired_by_question(llama: AuditResult) -> None:
    """One has no figures for question 2, the other none for 8: neither shifts what is said of the rest."""
    for left, right in ((2, 8), (8, 2)):
        results = {
            name: dataclasses.replace(llama, findings=[f for f in llama.findings if f.number != missing])
            for name, missing in (("a", left), ("b", right))
        }
        out = io.StringIO()
        print_pair(results, Console(file=out, width=2000))
        lines = [line.strip() for line in out.getvalue().splitlines()]
        for finding in llama.findings:
            at = lines.index(f"{finding.number} {finding.question}")
            said = {
                name: "no figure" if finding.number == n else finding.finding
                for name, n in (("a", left), ("b", right))
            }
            assert lines[at + 1 : at + 3] == [f"{name}: {text}" for name, text in said.items()]
