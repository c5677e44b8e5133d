"""Results for people and programs: terminal, JSON, CSV, one offline HTML file."""

from mainstem.report.check import check_to_json, print_check
from mainstem.report.figures import make_report
from mainstem.report.files import check_folder, to_csv, to_json, write_files
from mainstem.report.html import check_page, read_audit, to_html, write_html
from mainstem.report.pair import print_pair
from mainstem.report.schemes import print_schemes
from mainstem.report.terminal import plain_console, print_result

__all__ = [
    "check_folder",
    "check_page",
    "check_to_json",
    "make_report",
    "plain_console",
    "print_check",
    "print_pair",
    "print_result",
    "print_schemes",
    "read_audit",
    "to_csv",
    "to_html",
    "to_json",
    "write_files",
    "write_html",
]
