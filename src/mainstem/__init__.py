"""mainstem: build, train, audit and operate on the residual stream of deep transformers.

Importing this package imports nothing else; each part is imported by its own name:
``mainstem.connections``, ``mainstem.tower``, ``mainstem.observe``, ``mainstem.measure``,
``mainstem.sources``, ``mainstem.audit``, ``mainstem.report``.
"""

__version__ = "0.1.0"
