"""The command, run on published releases, finds their known faults and passes what is right.

The faults, found by reading and measured by hand before: x-transformers since 2.14.0 reshapes the logits of
its mixing matrix before the Sinkhorn iteration, so that the matrix is all ones; two of its residual options
take statistics over the whole sequence; the first mHC of hyper-connections slices a matrix that is not square
when it has fractions.
"""

from __future__ import annotations

from typing import Any

import pytest
import releases

pytestmark = pytest.mark.oracle

_found: dict[str, tuple[int, dict[str, Any]]] = {}


def found(case: releases.Case) -> tuple[int, dict[str, Any]]:
    if not case.python.exists():
        pytest.skip(f"{case.python} is not there; `make check-releases` makes it")
    if case.name not in _found:
        _found[case.name] = case.run()
    return _found[case.name]


def findings(factory: str, release: str) -> dict[str, list[dict[str, Any]]]:
    (case,) = [c for c in releases.CASES if (c.factory, c.release) == (factory, release)]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for finding in found(case)[1]["findings"]:
        by_kind.setdefault(finding["kind"], []).append(finding)
    return by_kind


@pytest.mark.parametrize("case", releases.CASES, ids=lambda c: c.name)
def test_exactly_the_known_faults_are_found(case: releases.Case) -> None:
    status, report = found(case)
    assert {f["kind"] for f in report["findings"]} == case.kinds
    assert status == (1 if case.kinds else 0)
    assert not [s for s in report["skipped"] if "raised" in s["reason"]]


def test_the_stream_of_x_transformers_grows_fourfold() -> None:
    """All ones, 4 x 4: the stream's norm is multiplied by 4 at each sublayer, up to what is written."""
    by_kind = findings("x_transformers_4_streams", releases.XT_NEW)
    (growth,) = by_kind["growth"]
    assert growth["figure"] == pytest.approx(4.0, rel=0.02)
    (sums,) = by_kind["mixing-sums"]
    assert sums["figure"] == pytest.approx(4.0, abs=1e-5)
    assert sums["details"]["shape"] == [4, 4]
    # 4**32 = 1.8e19, whose square is the largest fp32 number: of the depths, 16 is the first to overflow.
    forward = [f for f in by_kind["non-finite"] if f["details"]["phase"] == "forward"]
    assert [f["figure"] for f in forward] == [16.0]


@pytest.mark.parametrize("factory", ["x_transformers_orthogonal", "x_transformers_mv_split"])
def test_two_options_of_x_transformers_see_the_future(factory: str) -> None:
    leaks = findings(factory, releases.XT_NEW)["future-leak"]
    assert [leak["details"]["mode"] for leak in leaks] == ["eval", "train"]
    for leak in leaks:
        assert (
            leak["figure"] > 1e-3
        )  # by hand: 5e-3 and 4e-3, over more tokens, of which each has less weight
        assert leak["details"]["weights"] == "as built"
        assert leak["details"]["module"] == "attn_layers.layers.0.2"  # the residual of the first attention


def test_a_sinkhorn_of_hyper_connections_is_not_square() -> None:
    (sums,) = findings("mhc_v1_4_fractions", releases.HC)["mixing-sums"]
    assert sums["details"]["shape"] == [4, 19]
    assert sums["figure"] == pytest.approx(4 / 19, abs=1e-4)  # rows sum to 1, so 19 columns share 4
