"""Any amount of text: an audit that was interrupted goes on, and ends where it would have ended."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny

from mainstem.audit import AuditConfig, AuditResult, Ranks, Resume, audit_windows, run_audit
from mainstem.audit import _passes as passes
from mainstem.errors import MainstemError
from mainstem.measure import state_from_bytes, state_to_bytes
from mainstem.sources import load_model, load_text, make_windows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("amount"))


def config_of(folder: Path, **changes: Any) -> AuditConfig:
    """Seven batches of two windows, the last window short."""
    return tiny.config(folder, **{"tokens": 13 * 16 + 5, "batch_size": 2, **changes})


def figures(result: AuditResult) -> dict[str, Any]:
    """Everything but when it was made."""
    found = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    del found["provenance"]["created"]
    return found


def interrupted(config: AuditConfig, resume: Resume, *, after: int) -> None:
    """Audit, and break off while batch ``after`` is under way."""

    def tell(what: str, done: int, total: int) -> None:
        if what == "reading the stream" and done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_audit(config, tell, resume=resume)


@pytest.mark.parametrize("after", [1, 3, 6])
def test_an_audit_goes_on_to_the_bit(folder: Path, tmp_path: Path, after: int) -> None:
    config, seen = config_of(folder), list[int]()
    interrupted(config, Resume(tmp_path / "kept", every=2), after=after)
    resume = Resume(tmp_path / "kept", every=2)
    result = run_audit(
        config, lambda what, done, total: seen.append(done) if "stream" in what else None, resume=resume
    )
    assert min(seen[1:]) == after  # what was done was not done again
    assert figures(result) == figures(run_audit(config))
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [".resume-0.safetensors"]
    resume.remove()
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_finished_audit_whose_results_were_lost_is_not_read_again(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder)
    whole = run_audit(config, resume=Resume(tmp_path, every=4))
    batches: list[int] = []
    again = run_audit(config, lambda what, done, total: batches.append(done), resume=Resume(tmp_path))
    assert figures(again) == figures(whole)
    assert max(batches) == 7
    assert not {1, 2, 3, 4, 5, 6} & set(batches)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": 100}, "options.tokens was 213, now 100"),
        ({"dtype": "float64"}, "options.dtype was 'float32', now 'float64'"),
        ({"rounding_every": 2}, "options.rounding_every was 1, now 2"),
    ],
)
def test_other_choices_do_not_mix(folder: Path, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    interrupted(config_of(folder), Resume(tmp_path, every=2), after=2)
    other = config_of(folder, **changes)
    with pytest.raises(MainstemError, match="holds an interrupted audit with other choices") as error:
        run_audit(other, resume=Resume(tmp_path))
    assert says in str(error.value)
    assert "--fresh" in str(error.value)
    assert figures(run_audit(other, resume=Resume(tmp_path, fresh=True))) == figures(run_audit(other))


def test_another_model_or_text_by_the_same_name_is_noticed(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path)
    text = tmp_path / "text.txt"
    text.write_text(tiny.GPL.read_text("utf-8")[:3000], "utf-8")
    config = config_of(folder, text=str(text))
    interrupted(config, Resume(tmp_path / "out", every=2), after=3)
    text.write_text("x" + text.read_text("utf-8")[1:], "utf-8")
    with pytest.raises(MainstemError, match=r"text\.sha256 was"):
        run_audit(config, resume=Resume(tmp_path / "out"))
    text.write_text(tiny.GPL.read_text("utf-8")[:3000], "utf-8")
    tiny.save(tiny.MAKERS["llama"]().eval(), folder)
    with pytest.raises(MainstemError, match=r"model\.weights_sha256 was"):
        run_audit(config, resume=Resume(tmp_path / "out"))


def test_a_text_without_a_hash_is_known_by_its_tokens(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a dataset that is streamed nobody knows the content before it is read."""
    words = tiny.GPL.read_text("utf-8")[:3000]
    monkeypatch.setattr(
        "mainstem.audit.run.load_text",
        lambda name: dataclasses.replace(load_text(words), num_bytes=None),
    )
    config = config_of(folder)
    interrupted(config, Resume(tmp_path, every=2), after=3)
    words = "zzz" + words[3:]
    with pytest.raises(MainstemError, match="The text is not what it was when this audit was interrupted"):
        run_audit(config, resume=Resume(tmp_path))


def test_a_torn_file_is_said_to_be_one(folder: Path, tmp_path: Path) -> None:
    interrupted(config_of(folder), Resume(tmp_path, every=2), after=3)
    kept = tmp_path / ".resume-0.safetensors"
    kept.write_bytes(kept.read_bytes()[:-50])
    with pytest.raises(MainstemError, match=r"is no audit to go on with .* --fresh begins again"):
        run_audit(config_of(folder), resume=Resume(tmp_path))


def test_nothing_grows_with_the_text(folder: Path) -> None:
    """The sums after 30 batches take the bytes that they took after 10, but for buckets of the sketches."""
    loaded, sizes = load_model(folder), list[int]()
    config = config_of(folder, tokens=None)
    windows = make_windows(loaded.tokenizer, load_text(tiny.GPL), num_tokens=30 * 32, window=16, batch_size=2)

    class Watched(passes.Passes):
        def _batch(self, window: Any) -> None:
            super()._batch(window)
            kept = state_to_bytes(self.state_dict())
            sketches = [r.state_dict() for r in self.reducers if "_sketch" in r.saved]
            sizes.append(len(kept) - len(state_to_bytes(sketches)))

    job = Watched(loaded, windows, config, lambda *_: None)
    job.run(passes.Ranks())
    assert len(sizes) == 30
    assert sizes[-1] == pytest.approx(sizes[9], rel=0.02)  # digits of the sums in JSON
    assert state_from_bytes(state_to_bytes(job.state_dict()))["loss"]["num_tokens"] == 60 * 15


def test_windows_made_before_and_while_reading_give_the_same(folder: Path) -> None:
    config, loaded = config_of(folder), load_model(folder)
    windows = make_windows(
        loaded.tokenizer, load_text(tiny.GPL), num_tokens=config.tokens, window=16, batch_size=2
    )
    assert figures(audit_windows(loaded, windows, config)) == figures(run_audit(config))


def test_batches_are_dealt_out_once_each() -> None:
    takers = [[rank for rank in range(3) if Ranks(rank, 3).takes(batch)] for batch in range(7)]
    assert takers == [[0], [1], [2], [0], [1], [2], [0]]


def test_processes_do_not_share_all_devices() -> None:
    assert Ranks().device("auto") == "auto"
    assert Ranks(1, 2).device(None) is None
    with pytest.raises(MainstemError, match="2 processes have one each"):
        Ranks(1, 2).device("auto")
