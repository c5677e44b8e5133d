"""Measurements of mainstem itself. Run one with ``python -m benchmarks.NAME`` from the repository's root."""
