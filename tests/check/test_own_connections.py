"""Every connection of ours, as a stack and as a tower, passes the suite that others are held to."""

from __future__ import annotations

import pytest

from mainstem.check import CheckConfig, check, load_factory
from mainstem.check.own import subject_names

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("form", ["", "_tower"], ids=["stack", "tower"])
@pytest.mark.parametrize("name", subject_names())
def test_no_finding(name: str, form: str) -> None:
    report = check(load_factory(f"mainstem.check.own:{name}{form}"), CheckConfig(depths=(2, 8, 24)))
    assert report.findings == ()
    assert [s for s in report.skipped if "raised" in s.reason] == []
