"""``python -m mainstem`` is the command, for launchers such as torchrun."""

from mainstem.cli import main

main()
