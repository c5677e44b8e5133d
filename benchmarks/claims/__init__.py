"""What is said about residual streams, measured: ``docs/claims.md``."""
