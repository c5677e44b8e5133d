"""The main job: plan, run, and an `AuditResult` in a versioned, documented schema. Needs the extra
``[hf]``."""

from mainstem.audit._ranks import Ranks, joined
from mainstem.audit._resume import Resume
from mainstem.audit.config import QUESTIONS, AuditConfig
from mainstem.audit.result import (
    SCHEMA,
    AngularDistance,
    AuditResult,
    BlockDamage,
    BlockFigures,
    BooksSummary,
    Damage,
    Finding,
    Gradient,
    Identity,
    Loss,
    Outlier,
    RemovalPlan,
)
from mainstem.audit.run import audit_windows, map_of, run_audit

__all__ = [
    "QUESTIONS",
    "SCHEMA",
    "AngularDistance",
    "AuditConfig",
    "AuditResult",
    "BlockDamage",
    "BlockFigures",
    "BooksSummary",
    "Damage",
    "Finding",
    "Gradient",
    "Identity",
    "Loss",
    "Outlier",
    "Ranks",
    "RemovalPlan",
    "Resume",
    "audit_windows",
    "joined",
    "map_of",
    "run_audit",
]
