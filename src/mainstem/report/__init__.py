"""An `AuditResult` for people and programs: terminal, JSON, CSV."""

from mainstem.report.files import to_csv, to_json, write_files
from mainstem.report.terminal import print_result

__all__ = ["print_result", "to_csv", "to_json", "write_files"]
