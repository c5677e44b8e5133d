"""Ctrl-C for a command that runs as a process of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess


def interrupt(ran: subprocess.Popen[str]) -> tuple[str, str]:
    """Press Ctrl-C until the process ends: Python drops an interrupt that lands inside a finalizer."""
    for _ in range(6):
        ran.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return ran.communicate(timeout=20)
    ran.kill()
    return ran.communicate()
