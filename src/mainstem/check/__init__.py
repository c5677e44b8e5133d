"""The conformance suite, pointed at other people's code. Needs torch only.

report = check(lambda depth: TheirModel(num_layers=depth))
for finding in report.findings:
    print(finding.kind, finding.figure, finding.where, finding.says)
"""

from mainstem.check._load import load_factory
from mainstem.check._subject import CheckConfig, Factory, parse_depths
from mainstem.check.report import KINDS, SCHEMA, CheckReport, Finding, Outcome, Passed, Skipped
from mainstem.check.run import check
from mainstem.check.stack import ResidualStack

__all__ = [
    "KINDS",
    "SCHEMA",
    "CheckConfig",
    "CheckReport",
    "Factory",
    "Finding",
    "Outcome",
    "Passed",
    "ResidualStack",
    "Skipped",
    "check",
    "load_factory",
    "parse_depths",
]
