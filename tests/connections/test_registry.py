"""Names, options and mistakes."""

import pytest
import torch
from torch import nn

from mainstem.connections import (
    Connection,
    NormConfig,
    ParameterGroup,
    PreNorm,
    PreNormConnection,
    UnitOffsetRMSNorm,
    frozen_norm,
    make_scheme,
    parameter_groups,
    scheme_names,
)
from mainstem.errors import ConfigError, MainstemError


@pytest.mark.parametrize("name", scheme_names())
def test_a_scheme_is_made_by_its_name(name: str) -> None:
    assert make_scheme(name).name == name


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: make_scheme("hyper"), r"no connection is called 'hyper'; choose one of: .*pre_norm, "),
        (
            lambda: make_scheme("pre_norm", streams=4),
            r"'pre_norm' has no option streams; its options are: exact_start",
        ),
        (
            lambda: PreNorm().build(width=0, num_sublayers=2),
            r"width=0 and num_sublayers=2; both must be at least 1",
        ),
        (lambda: PreNorm().build(width=8, num_sublayers=0), r"num_sublayers=0"),
        (lambda: NormConfig(kind="batch"), r"'batch' is not known; choose 'rms' or 'layer'"),
        (lambda: NormConfig(eps=0.0), r"eps 0.0 must be greater than 0"),
        (lambda: NormConfig(kind="layer", unit_offset=True), r"needs norm kind 'rms'"),
        (lambda: frozen_norm(nn.BatchNorm1d(4), torch.ones(4)), r"cannot freeze a BatchNorm1d"),
    ],
)
def test_mistakes_are_named(mistake, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        mistake()
    assert isinstance(caught.value, MainstemError)
    assert isinstance(caught.value, ValueError)


def test_unit_offset_norm_is_the_plain_one_with_the_weight_moved() -> None:
    x = torch.randn(3, 16, dtype=torch.float64)
    plain = nn.RMSNorm(16, eps=1e-6, dtype=torch.float64)
    offset = UnitOffsetRMSNorm(16, eps=1e-6).double()
    with torch.no_grad():
        plain.weight.copy_(torch.randn(16))
        offset.weight.copy_(plain.weight - 1.0)
    # fp64, one norm: 1e-14 is some fifty roundings.
    torch.testing.assert_close(offset(x), plain(x), rtol=1e-14, atol=1e-14)


def test_tied_parameters_are_grouped_once_and_own_rates_are_kept() -> None:
    class Slow(PreNormConnection):
        def parameter_groups(self) -> list[ParameterGroup]:
            return [ParameterGroup(tuple(self.parameters()), lr_multiplier=0.1)]

    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": Slow(nn.RMSNorm(4))})
    model["b"].weight = model["a"].weight
    groups = {(g.lr_multiplier, g.weight_decay): len(g.parameters) for g in parameter_groups(model)}
    assert groups == {(0.1, False): 1, (1.0, True): 1, (1.0, False): 2}


def test_a_connection_that_forgets_a_parameter_is_refused() -> None:
    class Forgetful(PreNormConnection):
        def parameter_groups(self) -> list[ParameterGroup]:
            return []

    connection: Connection = Forgetful(nn.RMSNorm(4))
    with pytest.raises(ConfigError, match=r"'join' \(Forgetful\) hold 0 parameters, .* it has 1"):
        parameter_groups(nn.ModuleDict({"join": connection}))
