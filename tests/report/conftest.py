"""The tiny models of tests/audit."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from mainstem.audit import AuditResult, run_audit

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "audit"), str(TESTS / "sources")]


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> AuditResult:
    """The audit of a tiny Llama of three blocks."""
    tiny = importlib.import_module("tiny_models")
    return run_audit(tiny.config(tiny.make("llama", tmp_path_factory.mktemp("report"))))
