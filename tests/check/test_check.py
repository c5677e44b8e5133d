"""Each fault is found, in a model that has it alone, and a clean model has no finding."""

from __future__ import annotations

import random
from typing import Any

import broken
import pytest
import torch
from torch import Tensor, nn

from mainstem.check import KINDS, CheckConfig, CheckReport, Finding, Passed, Skipped, check, load_factory
from mainstem.errors import ConfigError

DEPTHS = CheckConfig(depths=(2, 4))
NOT_COMPILED = CheckConfig(depths=(2, 4), kinds=tuple(k for k in KINDS if k != "compile"))


def only(*kinds: str, depths: tuple[int, ...] = (2, 4)) -> CheckConfig:
    return CheckConfig(depths=depths, kinds=kinds)


def kinds(outcomes: Any) -> set[str]:
    return {o.kind for o in outcomes}


def one(report: CheckReport, kind: str) -> Any:
    (found,) = [o for o in report.outcomes if o.kind == kind]
    return found


@pytest.fixture(scope="module")
def reports() -> dict[str, CheckReport]:
    found: dict[str, CheckReport] = {}
    for name, (kind, factory) in broken.BROKEN.items():
        found[name] = check(factory, DEPTHS if kind in ("compile", "future-leak") else NOT_COMPILED)
    return found


def test_a_clean_model_has_no_finding() -> None:
    report = check(broken.clean, CheckConfig(depths=(2, 8, 24)))
    assert report.findings == ()
    assert kinds(report.skipped) == {"start-distance", "mixing-sums"}
    assert not report.is_stack
    for passed in report.passed:
        if passed.kind in ("future-leak", "batch-leak", "repeat", "train-eval", "save-load"):
            assert passed.figure == 0.0


@pytest.mark.parametrize("name", broken.BROKEN)
def test_a_fault_is_found(name: str, reports: dict[str, CheckReport]) -> None:
    kind, _ = broken.BROKEN[name]
    report = reports[name]
    for finding in report.findings:
        print(f"{name}: {finding.kind} {finding.figure} {finding.where}: {finding.says}")
    assert kind in kinds(report.findings)
    if name not in ("counting", "look ahead in training"):  # faults that show in two ways
        assert kinds(report.findings) == {kind}


def test_a_leak_is_shown_by_its_smallest_case(reports: dict[str, CheckReport]) -> None:
    found = [f for f in reports["look ahead"].findings if f.kind == "future-leak"]
    assert [f.details["mode"] for f in found] == ["eval", "train"]
    for finding in found:
        assert finding.depth == 2
        assert finding.details["tokens"] == 2
        assert finding.details["position"] == 0
        assert finding.details["module"] == "blocks.0.extra"
        # The figure is the difference itself, worked out here from the model.
        model = _built(broken.BROKEN["look ahead"][1], 2).eval()
        if finding.details["mode"] == "eval":
            assert finding.figure == pytest.approx(_leak(model, 2), rel=1e-6)


def _built(factory: Any, depth: int) -> nn.Module:
    torch.manual_seed(0)
    return factory(depth)


def _leak(model: nn.Module, tokens: int) -> float:
    """The largest change of earlier logits, for the inputs that the check uses."""
    ids = torch.randint(1, broken.VOCAB, (2, tokens), generator=torch.Generator().manual_seed(1000))
    changed = ids.clone()
    span = broken.VOCAB - 1
    changed[:, -1] = 1 + (ids[:, -1] - 1 + span // 2) % span
    with torch.no_grad():
        return float((model(ids) - model(changed))[:, :-1].abs().max())


def test_a_leak_behind_a_closed_gate_or_in_one_mode(reports: dict[str, CheckReport]) -> None:
    gated = [f for f in reports["gated look ahead"].findings if f.kind == "future-leak"]
    assert {f.details["weights"] for f in gated} == {"moved"}
    training = [f for f in reports["look ahead in training"].findings if f.kind == "future-leak"]
    assert [f.details["mode"] for f in training] == ["train"]
    assert [p.says[:4] for p in reports["look ahead in training"].passed if p.kind == "future-leak"] == [
        "eval"
    ]


def test_growth_is_the_factor(reports: dict[str, CheckReport]) -> None:
    """The block doubles once in two sublayers, so sqrt(2) for each, and a little for what is written."""
    finding = one(reports["doubled"], "growth")
    assert 2**0.5 <= finding.figure <= 1.2 * 2**0.5
    assert finding.depth == 4
    norms = finding.details["norms"]
    assert len(norms) == 1 + 2 * 4


def test_the_depth_from_which_it_is_not_finite() -> None:
    """A stream that grows by 1e9 a block is about 1e27 before block 3, where its squares leave fp32."""

    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 1e9 * x

    report = check(lambda depth: broken.Clean(depth, Large), only("non-finite", "growth", depths=(1, 2, 6)))
    found = {f.details["phase"]: f for f in report.findings if f.kind == "non-finite"}
    assert found["forward"].figure == 6.0
    assert found["forward"].where == "blocks.3.mix_norm"
    assert one(report, "growth").figure > 1e4


def test_dead_parameters_are_named(reports: dict[str, CheckReport]) -> None:
    finding = one(reports["unused"], "dead-parameter")
    assert finding.details["parameters"] == ["blocks.0.extra.unused", "blocks.1.extra.unused"]


def test_save_and_load(reports: dict[str, CheckReport]) -> None:
    assert one(reports["not saved"], "save-load").figure > 1e-3
    assert one(reports["stale tie"], "save-load").figure > 1e-3
    overlapping = one(reports["overlapping memory"], "save-load")
    assert overlapping.figure is None
    assert "cannot be saved and loaded through safetensors: RuntimeError" in overlapping.says


@pytest.mark.parametrize("options", [{}, {"shown": True}])
@pytest.mark.parametrize("balance", [broken.sinkhorn, broken.sinkhorn_in_logs])
def test_balanced_matrices_pass(balance: Any, options: dict[str, bool]) -> None:
    report = check(broken.streams(balance, **options), NOT_COMPILED)
    assert report.is_stack
    assert report.findings == ()
    sums = one(report, "mixing-sums")
    assert isinstance(sums, Passed)
    assert abs(sums.figure - 1) < 1e-3


def test_growth_in_proportion_to_the_depth_is_no_finding() -> None:
    """The bottom added again before every upper block: 24 % a block over the upper half, less and less."""
    factory = load_factory("mainstem.check.own:unet_skips_tower")
    report = check(factory, only("growth", depths=(8, 24)))
    assert report.findings == ()
    assert one(report, "growth").figure == pytest.approx(13 ** (1 / 12), rel=0.02)


def test_ones_are_found_by_their_sums_and_growth() -> None:
    report = check(broken.streams(broken.sinkhorn_of_a_row), only("mixing-sums", "growth", depths=(2, 8)))
    assert one(report, "mixing-sums").figure == pytest.approx(2.0, abs=1e-6)
    assert one(report, "growth").figure == pytest.approx(2.0, rel=0.1)


def test_rows_alone_are_found_where_they_are_shown() -> None:
    """A softmax over rows is no iteration, so only a connection that shows its matrix has it checked."""
    assert isinstance(
        one(check(broken.streams(broken.rows_alone), only("mixing-sums")), "mixing-sums"), Skipped
    )
    finding = one(check(broken.streams(broken.rows_alone, shown=True), only("mixing-sums")), "mixing-sums")
    torch.manual_seed(0)
    assert isinstance(finding, Finding)
    low, high = finding.details["row_sums"]
    assert low == pytest.approx(1.0, abs=1e-6)
    assert high == pytest.approx(1.0, abs=1e-6)
    low, high = finding.details["column_sums"]
    assert low < 1 - 1e-2 < 1 + 1e-2 < high
    assert finding.figure in (low, high)


def test_distance_from_plain_pre_norm() -> None:
    """Scaled branches of a stack: the figure against the same sums written out."""
    assert one(check(broken.plain_stack, only("start-distance")), "start-distance").figure == 0.0
    report = check(lambda depth: broken.plain_stack(depth, scale=0.5), only("start-distance"))
    passed = one(report, "start-distance")
    stack = _built(lambda depth: broken.plain_stack(depth, scale=0.5), 4)
    x = torch.randn(2, 12, broken.WIDTH, generator=torch.Generator().manual_seed(1000))
    with torch.no_grad():
        halved, plain = x, x
        for branch in stack.branches:
            halved = halved + 0.5 * branch(nn.functional.rms_norm(halved, (broken.WIDTH,), eps=1e-6))
            plain = plain + branch(nn.functional.rms_norm(plain, (broken.WIDTH,), eps=1e-6))
        halved, plain = (nn.functional.rms_norm(s, (broken.WIDTH,), eps=1e-6) for s in (halved, plain))
    assert passed.figure == pytest.approx(float((halved - plain).norm() / plain.norm()), rel=1e-5)
    claimed = check(lambda depth: broken.plain_stack(depth, scale=0.5, exact_start=True), NOT_COMPILED)
    assert kinds(claimed.findings) == {"start-distance"}


def test_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    check(broken.clean, CheckConfig(depths=(1,), kinds=NOT_COMPILED.kinds))
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_a_model_that_is_random_in_training_is_not_compared() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.1 * torch.randn_like(x) if self.training else x

    report = check(lambda depth: broken.Clean(depth, Noise), NOT_COMPILED)
    assert report.findings == ()
    assert "random" in one(report, "train-eval").reason


def test_a_module_that_raises_in_training_is_a_finding() -> None:
    class OnlyEval(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise NotImplementedError("no training")
            return x

    config = only("repeat", "dead-parameter", "growth")
    report = check(lambda depth: broken.Clean(depth, OnlyEval), config)
    assert [(f.kind, f.figure) for f in report.findings] == [("dead-parameter", None)]
    assert report.findings[0].says == "the module raised NotImplementedError: no training."


class Returns(nn.Module):
    def __init__(self, value: Any):
        super().__init__()
        self.value = value

    def forward(self, ids: Tensor) -> Any:
        return self.value


def on_meta(depth: int) -> nn.Module:
    with torch.device("meta"):
        return broken.clean(depth)


def long_winded(depth: int) -> nn.Module:
    raise ValueError("no such size.\nA page about sizes follows.")


def leaving(depth: int) -> nn.Module:
    raise SystemExit("usage: build.py [-h]")


class FewPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(4, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.position(torch.arange(ids.shape[1])).expand(len(ids), -1, -1)


def test_a_model_in_bf16_is_told_how_little_is_seen() -> None:
    says = one(check(lambda depth: broken.clean(depth).bfloat16(), only("repeat")), "repeat").says
    assert "outputs are bfloat16, of which no check sees a difference below 5% of the largest" in says
    assert "float" not in one(check(broken.clean, only("repeat")), "repeat").says


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (lambda depth: depth, "the factory gave a int; expected an nn.Module"),
        (lambda depth: None, "the factory gave nothing; does it return the module?"),
        (lambda depth: nn.Identity, "the factory gave the class Identity, not an instance of it"),
        (on_meta, "parameters on the meta device, which hold no values; build it on the CPU."),
        (long_winded, "the factory, called with 2, raised ValueError: no such size ..."),
        (leaving, "the factory, called with 2, raised SystemExit: usage: build.py [-h]"),
        (
            lambda depth: FewPositions(),
            "[2, 12] int64 token ids (IndexError: index out of range in self). If it",
        ),
        (lambda: nn.Identity(), "the factory, called with 2, raised TypeError"),
        (lambda depth: nn.Linear(4, 4), "cannot be run on [2, 12] int64 token ids (RuntimeError"),
        (lambda depth: Returns("text"), "the model returned str; expected logits"),
        (lambda depth: Returns(torch.zeros(2, 3)), "returned [2, 3]; expected [batch, pos, vocab]"),
    ],
)
def test_what_is_no_factory_of_models(factory: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(factory, DEPTHS)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"depths": ()}, {"depths": (0,)}, {"tokens": 1}, {"batch": 1}, {"width": 0}]
)
def test_a_config_that_cannot_be_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="at least"):
        CheckConfig(**wrong)


def test_a_check_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="there is no check 'leak'; the checks are: repeat, future-leak"):
        only("leak")
