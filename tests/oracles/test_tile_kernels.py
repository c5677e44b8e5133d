"""mHC against the plain PyTorch functions of tile-kernels 1.0.0, DeepSeek's own kernels' reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import Row
from around import WIDTH, draw, joins_of, one_file, side, some
from torch import Tensor, nn

from mainstem.connections import NormConfig, make_scheme
from mainstem.connections.mhc import CONVENTIONS

pytestmark = pytest.mark.oracle

STREAMS, EPS = 4, 1e-6


@pytest.mark.parametrize("multiplier", [1.0, 2.0])
def test_mhc(multiplier: float, agree: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """``multiplier`` 1 is their default. They compute in fp32 and round the stream to bf16, here not."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda self: self)
    reference = one_file("tile_kernels", "torch/mhc.py")
    scheme = make_scheme("mhc", num_streams=STREAMS, **CONVENTIONS["deepseek_v4"], multiplier=multiplier)
    trunk = scheme.build(width=WIDTH, num_sublayers=2, norm=NormConfig(eps=EPS))
    join = joins_of(trunk)[1]
    draw(join, std=0.3)
    own = dict(join.named_parameters())
    branch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    stream = some(2, 5, STREAMS, WIDTH, dtype=torch.float32).requires_grad_()
    weights = {k: own[f"gates.{k}"] for k in ("projection", "scale", "bias")} | {"norm": own["norm.weight"]}
    shared = weights | dict(branch.named_parameters())
    new = join(stream, branch)
    assert isinstance(new, Tensor)

    mixes = reference.mhc_pre_norm_fn_ref(stream, weights["projection"], None, EPS)
    pre, post, mix = reference.mhc_pre_split_mixes_ref(
        mixes, weights["scale"], weights["bias"], STREAMS, multiplier, EPS
    )
    mix = reference.sinkhorn_normalize_ref(mix, repeat=20, eps=EPS)
    read = reference.mhc_pre_apply_mix_ref(stream, pre)
    update = branch(nn.functional.rms_norm(read, (WIDTH,), weights["norm"], EPS))
    expected = reference.mhc_post_ref(update, stream, post, mix)
    row = Row(
        "mhc",
        "tile-kernels",
        f"torch/mhc.py, post_mult_value={multiplier:.0f}",
        "one step, every weight",
        "as DeepSeek-V4; its multiplier is 1 by default, the paper's 2",
    )
    agree(row, side(new, stream, **shared), side(expected, stream, **shared))


def test_the_head(agree: Callable[..., None]) -> None:
    reference = one_file("tile_kernels", "torch/mhc.py")
    scheme = make_scheme("mhc", num_streams=STREAMS, **CONVENTIONS["deepseek_v4"])
    trunk = scheme.build(width=WIDTH, num_sublayers=1, norm=NormConfig(eps=EPS))
    draw(trunk, std=0.3)
    weights = {k: trunk.get_parameter(f"head.{k}") for k in ("projection", "scale", "bias")}
    stream = some(2, 5, STREAMS, WIDTH, dtype=torch.float32).requires_grad_()
    mixes = reference.mhc_pre_norm_fn_ref(stream, weights["projection"], None, EPS)
    share = reference.mhc_head_compute_mix_ref(mixes, weights["scale"], weights["bias"], EPS)
    expected = (share.unsqueeze(-1) * stream).sum(-2)
    row = Row("mhc", "tile-kernels", "mhc_head_compute_mix_ref", "the way out of the streams, every weight")
    agree(row, side(trunk.collapse(stream), stream, **weights), side(expected, stream, **weights))
