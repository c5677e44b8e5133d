"""Wider streams and other residuals against hyper-connections 0.4.11."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import Row, Run
from around import WIDTH, build, copy_weights, draw, fp64, joins_of, side, some
from families import AllInFloat64
from test_torch import GRU_DEPARTS, held_to_a_cell
from torch import Tensor, nn

from mainstem.connections import Connection, NormConfig, Stream, make_scheme

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

STREAMS = 4
# Theirs divides by the length alone, without an epsilon.
NO_EPS = NormConfig(eps=1e-30)


def package(module: str) -> Any:
    return pytest.importorskip(
        f"hyper_connections.{module}", reason="needs hyper-connections; `make test-oracle` installs it"
    )


def one(name: str, **options: Any) -> Connection:
    join = joins_of(build(make_scheme(name, **options), 8, NO_EPS))[1]
    draw(join, std=0.3)
    with torch.no_grad():
        join.get_parameter("norm.weight").fill_(1.0)
    return join


def tensor(stream: Stream) -> Tensor:
    assert isinstance(stream, Tensor)
    return stream


def branch() -> nn.Module:
    with fp64():
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    draw(made)
    return made


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-30)


def in_batch(stream: Tensor) -> Tensor:
    """To ``[(batch streams), pos, width]``, where the package keeps its streams."""
    return stream.transpose(1, 2).flatten(0, 1)


def out_of_batch(stream: Tensor) -> Tensor:
    return stream.unflatten(0, (-1, STREAMS)).transpose(1, 2)


def test_hyper_connections(agree: Callable[..., None]) -> None:
    with fp64():
        theirs = package("hyper_connections").HyperConnections(STREAMS, dim=WIDTH, layer_index=1)
    draw(theirs)
    ours, f = one("hyper_connections", num_streams=STREAMS), branch()
    own = dict(ours.named_parameters())
    copy_weights(
        {
            "gamma": (theirs.norm.gamma.detach() + 1, own["stream_norm.weight"]),
            "alpha": (theirs.static_alpha.detach(), own["static_mix"]),
            "beta": (theirs.static_beta.detach(), own["static_write"]),
            "alpha_fn": (theirs.dynamic_alpha_fn.detach().T, own["dynamic_mix"]),
            "beta_fn": (theirs.dynamic_beta_fn.detach()[None], own["dynamic_write"]),
            "alpha_scale": (theirs.dynamic_alpha_scale.detach()[None], own["mix_scale"]),
            "beta_scale": (theirs.dynamic_beta_scale.detach()[None], own["write_scale"]),
        }
    )
    stream = some(2, 5, STREAMS, WIDTH).requires_grad_()
    mine = side(
        tensor(ours(stream, f)),
        stream,
        **{"norm.gamma": own["stream_norm.weight"], "static_alpha": own["static_mix"]},
        **{"static_beta": own["static_write"], "dynamic_alpha_fn": own["dynamic_mix"]},
        **{"dynamic_beta_fn": own["dynamic_write"], "dynamic_alpha_scale": own["mix_scale"]},
        **{"dynamic_beta_scale": own["write_scale"]} | dict(f.named_parameters()),
    )
    gradients: Any = dict(mine.gradients)
    gradients["dynamic_alpha_fn"] = gradients["dynamic_alpha_fn"].T
    for name in ("dynamic_beta_fn", "dynamic_alpha_scale", "dynamic_beta_scale"):
        gradients[name] = gradients[name][0]
    read, add = theirs(in_batch(stream))
    weights = dict(theirs.named_parameters()) | dict(f.named_parameters())
    expected = side(out_of_batch(add(f(normed(read)))), stream, **weights)
    row = Row("hyper_connections", "hyper-connections", "HyperConnections", "one step, every weight")
    agree(row, Run(mine.values, gradients), expected)


def test_frac_connections_read_and_carry(agree: Callable[..., None]) -> None:
    """What is read and what is carried, with their columns in our order.

    Their weights of the update are ``[fraction of the update, fraction of the stream]``, the same static one
    in each row: every fraction of the stream gets the sum of all of the update's, where the paper writes each
    to its own. No choice of weights makes that diagonal, so writes are not compared.
    """
    m = 4
    with fp64():
        theirs = package("hyper_connections").HyperConnections(1, dim=WIDTH, layer_index=0, num_fracs=m)
    draw(theirs)
    with torch.no_grad():
        theirs.norm.gamma.zero_()  # ours has no gain there
    ours = one("frac_connections", num_fractions=m)
    own = dict(ours.named_parameters())
    # Theirs: for each fraction, the column that is read and the one that is carried. Ours: all reads first.
    order = torch.cat([torch.arange(0, 2 * m, 2), torch.arange(1, 2 * m, 2)])
    copy_weights(
        {
            "alpha": (theirs.static_alpha.detach()[:, order], own["static_mix"]),
            "alpha_fn": (theirs.dynamic_alpha_fn.detach().T[order], own["dynamic_mix"]),
            "alpha_scale": (theirs.dynamic_alpha_scale.detach()[None], own["mix_scale"]),
        }
    )
    x = some(2, 5, WIDTH).requires_grad_()
    read, context = ours.read(x)
    carried = tensor(ours.linearize(x, torch.zeros_like(x), context).carry(x))
    names = {"alpha": "static_mix", "alpha_fn": "dynamic_mix", "alpha_scale": "mix_scale"}
    mine = side([read, carried], x, **{k: own[v] for k, v in names.items()})
    gradients: Any = dict(mine.gradients)
    back = torch.argsort(order)
    gradients["alpha"], gradients["alpha_fn"] = gradients["alpha"][:, back], gradients["alpha_fn"][back].T
    gradients["alpha_scale"] = gradients["alpha_scale"][0]
    their_read, rest, _ = theirs.width_connection(x)
    weights = (theirs.static_alpha, theirs.dynamic_alpha_fn, theirs.dynamic_alpha_scale)
    expected = side([normed(their_read), rest], x, **dict(zip(names, weights, strict=True)))
    row = Row(
        "frac_connections",
        "hyper-connections",
        "HyperConnections(num_fracs)",
        "read and carry, every weight of theirs",
        "writes the sum of the update's fractions to each fraction, the paper each to its own; its initial "
        "values put reads and carries into each other's columns",
    )
    agree(row, Run(mine.values, gradients), expected)


MHC_DEPARTS = (
    "norm and projections see one stream at a time (eq. 7: all at once). Compared where the two mean the same"
)


def mhc() -> tuple[Any, Connection, dict[str, Tensor]]:
    """Theirs and ours, whose projection sees one stream in each row."""
    with fp64():
        theirs = package("mHCv2").mHC(STREAMS, dim=WIDTH, layer_index=1)
    draw(theirs)
    with torch.no_grad():
        theirs.norm.gamma.zero_()
    ours = one("mhc", num_streams=STREAMS, orientation="in_out")
    own = dict(ours.named_parameters())
    alpha, beta = theirs.static_alpha.detach(), theirs.static_beta.detach()
    scales = (theirs.pre_branch_scale[0], theirs.h_post_scale, theirs.residual_scale[0])
    alpha_fn, beta_fn = theirs.dynamic_alpha_fn.detach()[0], theirs.dynamic_beta_fn.detach()
    rows = torch.zeros(2 * STREAMS + STREAMS**2, STREAMS, WIDTH, dtype=torch.float64)
    for s in range(STREAMS):
        rows[s, s], rows[STREAMS + s, s] = alpha_fn[:, 0], beta_fn[:, 0]
        for t in range(STREAMS):
            rows[2 * STREAMS + STREAMS * s + t, s] = alpha_fn[:, 1 + t]
    copy_weights(
        {
            "bias": (torch.cat([alpha[:, 0], beta.flatten(), alpha[:, 1:].flatten()]), own["gates.bias"]),
            "scale": (torch.stack([s.detach() for s in scales]), own["gates.scale"]),
            "projection": (rows.flatten(1), own["gates.projection"]),
        }
    )
    return theirs, ours, own


def their_layout(run: Run) -> Run:
    """Our gradients of bias, scale and projection as theirs of their weights."""
    g: Any = dict(run.gradients)
    n = STREAMS
    read, write, mix = g.pop("bias").split([n, n, n * n])
    g["static_alpha"], g["static_beta"] = torch.cat([read[:, None], mix.reshape(n, n)], 1), write
    g["pre"], g["post"], g["residual"] = g.pop("scale")
    rows = g.pop("projection").unflatten(1, (n, WIDTH))
    own = torch.arange(n)
    mixes = rows[2 * n :].unflatten(0, (n, n))
    # Each stream's own block of each row; theirs is one matrix for all streams.
    g["alpha_fn"] = torch.stack(
        [rows[own, own].sum(0), *(mixes[own, t, own].sum(0) for t in range(n))], dim=1
    )
    g["beta_fn"] = rows[n + own, own].sum(0)[:, None]
    return Run(run.values, g)


@pytest.mark.parametrize("part", ["static", "dynamic"])
def test_mhc(part: str, agree: Callable[..., None]) -> None:
    """``mHCv2``; it mixes ``in_out`` and divides columns first. Their casts to fp32 are to fp64 here.

    static: no weight depends on the token, any streams. dynamic: streams of the same size, for which the norm
    of one is that of all; the gradient of the streams is left out, since only there the norms differ.
    """
    theirs, ours, own = mhc()
    f, stream = branch(), some(2, 5, STREAMS, WIDTH)
    if part == "static":
        with torch.no_grad():
            own["gates.projection"].zero_()
            theirs.dynamic_alpha_fn.zero_()
            theirs.dynamic_beta_fn.zero_()
    else:
        stream = normed(stream)
    stream.requires_grad_()
    names = {"bias": "gates.bias", "scale": "gates.scale", "projection": "gates.projection"}
    f_weights = dict(f.named_parameters())
    mine = their_layout(
        side(tensor(ours(stream, f)), stream, **{k: own[v] for k, v in names.items()}, **f_weights)
    )
    with AllInFloat64():
        read, add = theirs(stream)
        new = add(f(normed(read)))
    weights = {
        "static_alpha": theirs.static_alpha,
        "static_beta": theirs.static_beta,
        "pre": theirs.pre_branch_scale,
        "post": theirs.h_post_scale,
        "residual": theirs.residual_scale,
        "alpha_fn": theirs.dynamic_alpha_fn,
        "beta_fn": theirs.dynamic_beta_fn,
    }
    expected = side(new, stream, **weights, **f_weights)
    left_out = ("input",) if part == "dynamic" else ("pre", "post", "residual", "alpha_fn", "beta_fn")
    both = []
    for run in (mine, expected):
        shaped = {k: g for k, g in run.gradients.items() if k not in left_out}
        both.append(Run(run.values, {k: None if g is None else g.reshape(-1) for k, g in shaped.items()}))
    what = {
        "static": "one step, any streams, every static weight",
        "dynamic": "one step, streams of one size, every weight; not the streams' gradient",
    }
    agree(Row("mhc", "hyper-connections", f"mHCv2, {part} part", what[part], MHC_DEPARTS), *both)


def test_gru_gated_residual(agree: Callable[..., None]) -> None:
    with fp64():
        theirs = package("residuals").GRUGatedResidual(WIDTH)
    row = Row("gru_gate", "hyper-connections", "GRUGatedResidual", "one step, every weight", GRU_DEPARTS)
    agree(row, *held_to_a_cell(theirs.gru, lambda u, x: theirs(u, x)))


def test_orthogonal_update(agree: Callable[..., None]) -> None:
    """Theirs has no epsilon."""
    theirs = package("residuals").OrthogonalResidualUpdate()
    join = joins_of(build(make_scheme("orthogonal_update", eps=1e-30), 1, NormConfig()))[0]
    x, u = some(2, 5, WIDTH).requires_grad_(), some(2, 5, WIDTH, seed=3).requires_grad_()
    inputs = {"input": x, "update": u}
    row = Row("orthogonal_update", "hyper-connections", "OrthogonalResidualUpdate", "one step")
    agree(row, side(tensor(join.write(x, u, None)), inputs), side(theirs(u, x), inputs))


def test_mv_split_at_the_last_position(agree: Callable[..., None]) -> None:
    """Their means are over all tokens; at the last one ours, over what was read, is the same."""
    with fp64():
        theirs = package("residuals").MVSplitResidualUpdate(WIDTH)
    draw(theirs)
    join = joins_of(build(make_scheme("mv_split"), 1, NormConfig()))[0]
    norm: Any = join.get_submodule("norm")
    own = {"alpha": join.get_parameter("mean_weight"), "beta": join.get_parameter("centred_weight")}
    copy_weights({k: (theirs.get_parameter(k).detach(), w) for k, w in own.items()})
    x, u = some(2, 5, WIDTH).requires_grad_(), some(2, 5, WIDTH, seed=3).requires_grad_()
    inputs = {"input": x, "update": u}
    ours = side(tensor(join.write(x, u, None))[:, -1], inputs, norm=norm.weight, **own)
    expected = norm(theirs(u, x))[:, -1]
    row = Row(
        "mv_split",
        "hyper-connections",
        "MVSplitResidualUpdate",
        "one step at the last position, every weight",
        "means over all tokens, which no causal model can have; the norm after the sum is ours here",
    )
    agree(row, ours, side(expected, inputs, norm=norm.weight, **dict(theirs.named_parameters())))
