"""Results for people and programs: terminal, JSON, CSV."""

from mainstem.report.files import check_folder, to_csv, to_json, write_files
from mainstem.report.schemes import print_schemes
from mainstem.report.terminal import plain_console, print_result

__all__ = [
    "check_folder",
    "plain_console",
    "print_result",
    "print_schemes",
    "to_csv",
    "to_json",
    "write_files",
]
