"""The benchmarks measure what they say, and memory does not grow with depth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks._harness import Timing, emit, interleave, pair, saved_bytes, summarize
from benchmarks.connections_cost import build_stacks, page
from benchmarks.recording import measure_memory_here, peak_bytes
from benchmarks.stream_monitor import timings


def test_contenders_take_turns() -> None:
    order: list[str] = []
    timings = interleave({name: lambda n=name: order.append(n) for name in "abc"}, "a", 3)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"  # untimed once, then another begins each round
    assert set(timings) == set("abc")
    assert all(len(t.seconds) == 3 for t in timings.values())
    assert timings["a"].ratios == (1.0, 1.0, 1.0)


def test_ratios_are_taken_within_a_round() -> None:
    timings = {
        "slow": Timing((2.0, 4.0, 6.0), (1.0, 2.0, 3.0)),
        "base": Timing((2.0, 2.0, 2.0), (1.0, 1.0, 1.0)),
    }
    found = summarize(timings, "base")["slow"]
    assert found["ratio"] == 2.0
    assert found["median_s"] == 4.0
    assert found["ratio_of_minima"] == 1.0


def test_a_result_names_versions_and_no_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "all.jsonl"
    for value in (1, 2):
        emit({"value": value}, out)
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [line["value"] for line in lines] == [1, 2]
    assert lines[0]["versions"]["torch"] == torch.__version__
    assert capsys.readouterr().out == out.read_text(encoding="utf-8")
    assert str(tmp_path) not in out.read_text(encoding="utf-8")


def test_peak_counts_what_is_held_at_once() -> None:
    mebibyte = 2**18  # entries of fp32

    def two_at_once() -> None:
        a = torch.zeros(mebibyte)
        b = torch.zeros(mebibyte)
        del a
        c = torch.zeros(mebibyte)
        del b, c

    # The allocator aligns to 64 bytes; a third tensor at once would be half as much again.
    assert 2 * 2**20 <= peak_bytes(two_at_once) < 2.1 * 2**20


def test_memory_of_recording_does_not_grow_with_depth() -> None:
    shallow, deep = measure_memory_here(12, 4, 128), measure_memory_here(48, 4, 128)
    assert shallow["recorded"] > shallow["bare"] > 0
    # Holding the states would add 36; what is held is a few numbers a token, a last token a state, and
    # the rows in which rounding is looked at.
    assert deep["recorded"] - shallow["recorded"] < 2 * shallow["state"]
    assert deep["recorded"] <= 1.1 * shallow["recorded"]


def test_a_contender_stands_between_two_runs_of_the_reference() -> None:
    order: list[str] = []
    clock = iter([0.0, 2.0, 0.0, 3.0, 0.0, 2.0])  # start and end: reference, contender, reference
    contenders = {"a": lambda: order.append("a")}
    timings = pair(contenders, lambda: order.append("r"), 1, clock=lambda: next(clock))
    assert "".join(order) == "ra" + "rar"  # each once untimed before
    assert timings["a"] == Timing((3.0,), (1.5,))


def test_a_disturbed_pair_is_run_again() -> None:
    # Reference, then contender and reference: 2, (9, 4), (6, 4): the second pair stands between equal runs.
    clock = iter([0.0, 2.0, 0.0, 9.0, 0.0, 4.0, 0.0, 6.0, 0.0, 4.0])
    timings = pair({"a": lambda: None}, lambda: None, 1, clock=lambda: next(clock))
    assert timings["a"] == Timing((6.0,), (1.5,))


def test_saved_bytes_are_counted_once_and_without_parameters() -> None:
    layer = torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    assert saved_bytes(lambda: layer(x) + layer(x), layer) == 4 * 8 * 4


def test_stacks_of_the_same_branches_start_as_pre_norm() -> None:
    stacks, _ = build_stacks(["Pre-LN by hand", "rezero", "dense_former", "hyper_connections"], (2, 16, 2, 8))
    x = torch.randn(2, 8, 16)
    plain = stacks.pop("pre_norm")(x)
    for name in ("Pre-LN by hand", "dense_former", "hyper_connections", "hyper_connections, recompute"):
        torch.testing.assert_close(stacks[name](x), plain, rtol=1e-4, atol=1e-5)


def test_the_page_has_a_row_each() -> None:
    row = {"ratio": 1.25, "ratio_q1": 1.2, "ratio_q3": 1.3, "saved": 1.5}
    setting = dict.fromkeys(("blocks", "width", "heads", "sequences", "tokens", "threads", "repetitions"), 2)
    made = page(
        {
            "setting": setting,
            "base": {"seconds": 1.0, "saved_mb": 10.0},
            "peers": {"hyper-connections": "absent"},
            "left_out": ["hyper-connections HC"],
            "results": {"mhc, recompute": row},
        }
    )
    assert "| mhc, recompute | 1.25 | 1.20 to 1.30 | 1.50 |" in made
    assert made.endswith("Left out, their packages missing: hyper-connections HC.\n")


def test_the_monitor_is_timed_in_rounds_but_the_first() -> None:
    found = timings({"bare": [9.0, 1.0, 2.0], "unrecorded": [9.0, 1.0, 2.0], "recorded": [9.0, 1.5, 4.0]})
    assert found["bare"].ratios == (1.0, 1.0)
    assert found["recorded"].seconds == (1.5, 4.0)
    assert found["recorded"].ratios == (1.5, 2.0)
