"""The main job: load, find the stream, read the text once, and say what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import mainstem
from mainstem.audit._assemble import assemble
from mainstem.audit._checks import check_device, clear_failures, window_that_fits
from mainstem.audit._passes import TOLERANCE, Passes, Progress
from mainstem.audit._placement import device_of
from mainstem.audit._provenance import provenance_of
from mainstem.audit._ranks import Ranks, joined
from mainstem.audit._resume import Resume
from mainstem.audit._sweep import Skips
from mainstem.audit.config import AuditConfig
from mainstem.audit.result import AuditResult
from mainstem.observe import StreamMap, stream_of
from mainstem.sources import (
    LoadedModel,
    TextSource,
    Windows,
    WindowStream,
    load_model,
    load_text,
)

__all__ = ["TOLERANCE", "Progress", "audit_windows", "map_of", "run_audit"]


def run_audit(
    config: AuditConfig, progress: Progress | None = None, *, resume: Resume | None = None
) -> AuditResult:
    """Audit a model on a text; under ``torchrun`` the text is shared out, and all processes get the result.

    Args:
        config: what to do.
        progress: told of every step, by the first process.
        resume: keeps what was summed so far, and goes on from what it kept; `Resume.remove` it when the
            result is safe. Not used where processes share the weights: they have to stop at the same batch.

    Raises:
        MainstemError: a mistake in the model, the text or the options; no stream was found; or the books do
            not balance, in which case no figure is given.
    """
    with joined(config.device) as ranks:
        resume = None if ranks.weights else resume
        tell = progress if progress is not None and ranks.rank == 0 else _silent
        device = ranks.device(config.device)
        check_device(device)
        tell("reading the text", 0, 1)
        text = load_text(config.text)
        tell("loading the model", 0, 1)
        loaded = load_model(
            config.model,
            dtype=config.dtype,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            device=device,
        )
        windows = WindowStream(
            loaded.tokenizer,
            text,
            num_tokens=config.tokens,
            window=window_that_fits(loaded.model, config.window),
            batch_size=config.batch_size,
            first_token=config.first_token,
            pad_side=config.pad_side,
        )
        kept = None if resume is None else resume.load(_identity_of(config, loaded, text, ranks), ranks)
        return _audit(loaded, windows, config, tell, ranks, resume, kept)


def _identity_of(config: AuditConfig, loaded: LoadedModel, text: TextSource, ranks: Ranks) -> dict[str, Any]:
    """Return what an interrupted audit and the one that goes on from it must share."""
    names = ("architecture", "weights_sha256", "dtype", "attention", "device")
    return {
        "mainstem": mainstem.__version__,
        "torch": torch.__version__,
        "processes": ranks.size,
        "options": config.to_dict(),
        "model": {name: loaded.provenance.get(name) for name in names},
        "text": {**text.provenance, "sha256": text.sha256()},
    }


def map_of(
    name: str,
    *,
    dtype: str = "float32",
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> StreamMap:
    """Load a model and find its stream on a few made-up tokens.

    Raises:
        MainstemError: a mistake in the model or the options, or no stream was found.
    """
    check_device(device)
    loaded = load_model(
        name, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code, device=device
    )
    known = getattr(loaded.model.get_input_embeddings(), "num_embeddings", 2)
    ids = torch.arange(2 * 7, device=device_of(loaded.model)).reshape(2, 7) % known
    with clear_failures(loaded.model):
        return stream_of(loaded.model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def audit_windows(
    loaded: LoadedModel,
    windows: Windows | WindowStream,
    config: AuditConfig,
    progress: Progress | None = None,
) -> AuditResult:
    """Audit a model that is loaded on windows of a text, in this process; see :func:`run_audit`."""
    return _audit(loaded, windows, config, progress or _silent, Ranks(), None, None)


def _audit(
    loaded: LoadedModel,
    windows: Windows | WindowStream,
    config: AuditConfig,
    tell: Progress,
    ranks: Ranks,
    resume: Resume | None,
    kept: Mapping[str, Any] | None,
) -> AuditResult:
    with torch.no_grad(), clear_failures(loaded.model):
        job = Passes(loaded, windows, config, tell)
        job.run(ranks, resume, kept)
        provenance = provenance_of(config, loaded, windows, job.stream_map)
        provenance["machine"]["processes"] = ranks.size
        results = {r.name: r.result() for r in job.reducers}
        kind = str(loaded.provenance.get("kind"))
        skips = Skips(loaded.model, kind, config, job.inputs_of, job.map_for, tell)
        swept = skips.run(windows, results)
    return assemble(
        provenance=provenance,
        stream_map=job.stream_map,
        reducers=results,
        lens=job.lens.result() if job.lens is not None else None,
        loss=job.loss if job.predicts_next else None,
        probed=job.probes.close(),
        swept=swept,
        books=job.books,
        tolerance=job.tolerance,
        decode=_decoder(loaded.tokenizer),
    )


def _decoder(tokenizer: Any) -> Callable[[int], str]:
    return lambda token: str(tokenizer.decode([token]))


def _silent(what: str, done: int, total: int) -> None:
    return None
