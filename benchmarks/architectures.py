"""Write ``docs/architectures.md``: every causal and masked language model class of transformers, tried.

Each class is built small from its own configuration with random weights; configurations that the tests keep
(``tests/observe/zoo.py``) are taken from there, all others are shrunk by the rules below. A class is tried in
a process of its own, so that whatever it does ends with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks._harness import versions
from mainstem.errors import MainstemError
from mainstem.observe import KeepStream, StreamMap, find_stream, ledger, record

ROOT = Path(__file__).parents[1]
R = TypeVar("R")
VOCAB, WIDTH, BLOCKS = 100, 64, 4
MOST_PARAMETERS = 20_000_000
SECONDS = 60

ADDITIVITY, LEDGER = 1e-6, 1e-5
"""What fp32 may be off by: a sum of three terms, and four blocks of carries through norms or mixings."""

WORKS, NOTED, REFUSED, WRONG, NOT_BUILT = "works", "works with a note", "refused", "wrong", "not built"

# One number for each of the names that configurations use for it.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "d_embed"), WIDTH),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), WIDTH),
    **dict.fromkeys(
        ("word_embed_proj_dim", "lru_width", "attention_hidden_size", "cross_attention_hidden_size"), WIDTH
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "ffn_hidden_size", "n_inner"), 96),
    **dict.fromkeys(
        ("decoder_ffn_dim", "encoder_ffn_dim", "hidden_dim", "dff", "dim_ff", "feed_forward_size"), 96
    ),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size", "ffn_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"), BLOCKS),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"), BLOCKS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(
        ("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 4
    ),
    **dict.fromkeys(("swa_num_attention_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "global_head_dim", "linear_key_head_dim"), 16),
    **dict.fromkeys(
        ("linear_value_head_dim", "linear_head_dim", "d_kv", "v_head_dim", "attention_head_dim"), 16
    ),
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32
    ),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "ffn_hidden_size_per_expert"), 32),
    **dict.fromkeys(("q_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "o_groups": 2},
    **{"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16, "indexer_n_heads": 2},
    **{"state_size": 8, "mamba_d_state": 8, "mamba_d_ssm": 2 * WIDTH, "mamba_n_heads": 8, "mamba_d_head": 16},
    **{"mamba_dt_rank": 4, "mamba_n_groups": 1, "n_groups": 1, "mamba_chunk_size": 16, "chunk_size": 16},
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "use_mamba_kernels": False},
    **{"max_position_embeddings": 128, "n_positions": 128, "seq_length": 128, "max_seq_len": 128},
    **{"sliding_window": 8, "attention_window_size": 8, "attention_chunk_size": 8, "window_size": 8},
    **{
        "hidden_size_per_layer_input": 16,
        "rotary_dim": 8,
        "first_k_dense_replace": 1,
        "num_kv_shared_layers": 0,
    },
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}

# What the rules cannot know, by class.
OVERRIDES: dict[str, dict[str, Any]] = {
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "LukeForMaskedLM": {"entity_vocab_size": 10, "entity_emb_size": WIDTH},
}

# Classes whose stream depends on a choice of the configuration, tried a second time.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma4ForCausalLM, no per-layer input": ("Gemma4ForCausalLM", {"hidden_size_per_layer_input": 0}),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What came of one class.

    Attributes:
        outcome: one of the five words above; ``reason``: notes of the map, the refusal, or what failed.
        states: how many of the hidden states that transformers gives equal ours to the bit, of how many.
    """

    name: str
    kind: str
    outcome: str
    reason: str = ""
    blocks: int = 0
    sublayers: int = 0
    writes: str = ""
    streams: int = 1
    carry: str = ""
    additivity: float = 0.0
    ledger: float = 0.0
    states: str = ""

    def line(self) -> str:
        """Return the row of the table."""
        errors = [f"{value:.1e}" if value else "0" for value in (self.additivity, self.ledger)]
        cells = [f"`{self.name}`", self.kind, self.blocks, self.sublayers, self.writes, self.streams]
        return (
            "| " + " | ".join(str(c) for c in (*cells, self.carry, *errors, self.states, self.reason)) + " |"
        )


# ---- small models ------------------------------------------------------------------------------------------


def shrunk(config_class: Any, changes: Mapping[str, Any]) -> Any:
    """Return a configuration with the sizes above, as far as it has them, and ``changes``.

    Sub-configurations are shrunk alike. Lists with an entry a layer follow from the number of layers.
    """
    plain = config_class()
    known = {**plain.to_dict(), **dict.fromkeys(plain.attribute_map)}
    sizes = {name: size for name, size in SIZES.items() if name in known}
    for name, new in plain.attribute_map.items():  # one name for each size
        if name in sizes:
            sizes.setdefault(new, sizes.pop(name))
    if "kv_lora_rank" in sizes:  # latent attention: its rotary part is the head, and heads are not grouped
        sizes |= {name: size for name, size in (("head_dim", 8), ("num_key_value_heads", 4)) if name in sizes}
    parts = getattr(plain, "sub_configs", None) or {}
    for name in parts:
        part = getattr(plain, name, None)
        if part is not None and hasattr(part, "to_dict"):
            sizes[name] = shrunk(type(part), changes.get(name, {})).to_dict()
    return config_class(**{**sizes, **{k: v for k, v in changes.items() if k not in parts}})


def build(model_class: Any, changes: Mapping[str, Any] | None = None) -> torch.nn.Module:
    """Return a small model with shaken norm weights.

    Raises:
        Exception: whatever the configuration or the model says to these sizes.
    """
    name = model_class.__name__
    equal_heads = {"num_key_value_heads": 4}
    failure: Exception | None = None
    for more in ({}, equal_heads):
        try:
            config = shrunk(model_class.config_class, {**OVERRIDES.get(name, {}), **more, **(changes or {})})
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(config).parameters())
            if size > MOST_PARAMETERS:
                raise ValueError(f"still {size / 1e6:.0f} M parameters with the sizes used here")
            torch.manual_seed(0)
            model = model_class(config)
            break
        except Exception as error:
            failure = failure or error
    else:
        assert failure is not None
        raise failure
    for parameter in model.parameters():
        if parameter.ndim <= 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model.float().eval()


def inputs_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return two sequences of 11 tokens, as ids of the decoder too where there is an encoder."""
    ids = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))
    config: Any = model.config
    if config.is_encoder_decoder and "decoder_input_ids" in model.forward.__code__.co_varnames:
        return {"input_ids": ids[:, :9], "decoder_input_ids": ids}
    return {"input_ids": ids}


# ---- one class ---------------------------------------------------------------------------------------------


def attempt(name: str, kind: str, make: Callable[[], torch.nn.Module], make_inputs: Any, source: Any) -> Row:
    """Build a class, find its stream and check its books."""
    try:
        model = make()
        inputs = make_inputs() if make_inputs else inputs_of(model)
        uncached = inputs | {"use_cache": False}
        try:
            run(model, inputs)
        except ValueError:  # a hybrid whose first attention lies beyond four blocks wants no cache
            run(model, uncached)
            inputs = uncached
    except Exception as error:
        return Row(name, kind, NOT_BUILT, brief(error))
    notes: list[str] = []
    try:
        try:
            stream_map = find_stream(model, inputs, source=source)
        except MainstemError:
            stream_map = find_stream(model, uncached, source=source)
            inputs = uncached
        if inputs.get("use_cache") is False:
            notes.append("with `use_cache=False` only")
    except MainstemError as error:
        return Row(name, kind, REFUSED, brief(error, whole=True))
    except TypeError:  # it takes no `use_cache`
        return Row(name, kind, REFUSED, refusal(model, inputs, source))
    return measure(name, kind, model, inputs, stream_map, notes)


def run(model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
    """Run the model without gradients."""
    with torch.no_grad():
        return model(**inputs)


def refusal(model: torch.nn.Module, inputs: dict[str, Any], source: Any) -> str:
    """Return what is said about a model that is refused."""
    try:
        find_stream(model, inputs, source=source)
    except MainstemError as error:
        return brief(error, whole=True)
    raise AssertionError("it was refused before")


def measure(
    name: str, kind: str, model: Any, inputs: dict[str, Any], stream_map: StreamMap, notes: list[str]
) -> Row:
    """Record a pass, and compare with the model's own figures."""
    kept = KeepStream()
    bare = main_output(run(model, inputs), stream_map)
    with torch.no_grad():
        seen = record(model, inputs, stream_map, [kept])
    error = ledger(model, inputs, stream_map).error
    faults: list[str] = []
    if not torch.equal(main_output(seen.output, stream_map), bare):
        faults.append("recording changes the output")
    if not (seen.books.additivity <= ADDITIVITY and seen.books.continuity <= ADDITIVITY and error <= LEDGER):
        faults.append("the books do not balance")
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    if isinstance(layers, int) and layers != len(stream_map.blocks):
        notes.append(f"{len(stream_map.blocks)} blocks for `num_hidden_layers={layers}`")
    notes += stream_map.notes
    sites = stream_map.sites
    if any(site.carry == "none" for site in sites):
        notes.append(f"{sum(site.carry == 'none' for site in sites)} sublayers without a residual")
    kinds = Counter("+".join(w.kind for w in site.writes) for site in sites)
    carries = dict.fromkeys(f"{s.carry}, then {s.then}" if s.then != "identity" else s.carry for s in sites)
    return Row(
        name,
        kind,
        WRONG if faults else NOTED if notes else WORKS,
        "; ".join(faults + notes),
        blocks=len(stream_map.blocks),
        sublayers=len(sites),
        writes=", ".join(kinds),
        streams=stream_map.num_streams,
        carry=" / ".join(carries),
        additivity=max(seen.books.additivity, seen.books.continuity),
        ledger=error,
        states=states_that_agree(model, inputs, kept, len(stream_map.blocks)),
    )


def main_output(output: Any, stream_map: StreamMap) -> torch.Tensor:
    """Return the tensor that the map ends in."""
    if isinstance(output, Mapping) and stream_map.output in output:
        return output[stream_map.output]
    return next(t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor))


def states_that_agree(model: Any, inputs: dict[str, Any], kept: KeepStream, blocks: int) -> str:
    """Count the states before each block that are among the hidden states transformers gives."""
    try:
        output = run(model, inputs | {"output_hidden_states": True})
    except (TypeError, ValueError, AttributeError, IndexError):
        return "-"
    given = output.get("decoder_hidden_states") or output.get("hidden_states") or ()
    theirs = [t for t in given if isinstance(t, torch.Tensor)]
    ours = [kept["resid_pre", block] for block in range(blocks)]
    if not theirs:
        return "-"
    return f"{sum(any(torch.equal(own, t) for t in theirs) for own in ours)}/{blocks}"


def brief(error: Exception, *, whole: bool = False) -> str:
    """Return an error in one line, fit for a cell."""
    text = " ".join(str(error).split()).replace("|", "\\|") or "no message"
    text = text if whole else f"{type(error).__name__}: {text}"
    return text if len(text) <= 320 else text[:317] + "..."


def tried(work: Callable[[], R], wrong: Callable[[str], R]) -> R:
    """Do the work in a process of its own; an error that was not foreseen is a row, too."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def child(connection: Connection) -> None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # processor time: other work is no fault of the class
        signal.alarm(10 * SECONDS)
        try:
            connection.send(work())
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f" ({Path(last.filename).name}:{last.lineno})"
            connection.send(wrong(brief(Exception(f"{type(error).__name__}: {error}{where}"))))

    process = context.Process(target=child, args=(there,))
    process.start()
    there.close()
    try:
        row = here.recv()
    except EOFError:
        row = None
    process.join()
    return row or wrong(f"its process ended with exit code {process.exitcode}")


# ---- all classes -------------------------------------------------------------------------------------------


def classes() -> dict[str, str]:
    """Return the names of all causal and masked language model classes, with which they are."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for kind, names in (
        ("causal", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("masked", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ):
        for name in names.values():
            found.setdefault(name, kind)
    return dict(sorted(found.items()))


def zoo_cases() -> dict[str, Any]:
    """Return the tests' own small configurations by class."""
    sys.path.insert(0, str(ROOT / "tests" / "observe"))
    import zoo  # only now is it on the path

    found: dict[str, Any] = {}
    for name, case in (zoo.CASES | zoo.REFUSED).items():
        if not name.startswith(("tower_", "hand_", "torch_")):
            found.setdefault(type(case.build()).__name__, case)
    return found


HEADER = """# Architectures

Made by `make architectures`; do not edit. Every class that transformers lists for causal and masked language
modelling, built small from its own configuration ({width} wide, {blocks} blocks, random weights, norm weights
and biases shaken, fp32), run on 2 sequences of 11 tokens; {versions}.
{counts}.

- **additivity**: largest of `|after - (carried + writes)| / |after|` and of the difference between what a
  sublayer carries and what the one before left, over sublayers and tokens; at most {additivity:.0e}.
- **ledger**: `|sum of all contributions - final state| / |final state|`; at most {ledger:.0e}.
- **states**: how many of the states before a block are, to the bit, among the hidden states that transformers
  gives; `-` where it gives none. Fewer than all where transformers takes its states elsewhere or in another
  layout; this is shown, not judged.
- A class *works* if its stream is found, these figures hold, and recording leaves its output the same to the
  bit. It works *with a note* if there is something to know first. A class is *refused* with a sentence if no
  stream can be shown.
"""

COLUMNS = [
    "class",
    "kind",
    "blocks",
    "sublayers",
    "writes",
    "streams",
    "carry",
    "additivity",
    "ledger",
    "states",
]


def page(rows: list[Row]) -> str:
    """Return the page."""
    counts = Counter(row.outcome for row in rows)
    said = ", ".join(f"{o}: {counts[o]}" for o in (WORKS, NOTED, REFUSED, WRONG, NOT_BUILT) if counts[o])
    known = ", ".join(f"{k} {v}" for k, v in versions("transformers", "torch").items())
    lines = [
        HEADER.format(
            versions=known,
            width=WIDTH,
            blocks=BLOCKS,
            counts=f"{len(rows)} models; {said}",
            additivity=ADDITIVITY,
            ledger=LEDGER,
        )
    ]
    for outcome, title in ((WORKS, "Works"), (NOTED, "Works with a note"), (WRONG, "Wrong")):
        if counts[outcome]:
            lines += [f"## {title}\n", "| " + " | ".join([*COLUMNS, "note"]) + " |"]
            lines += [
                "|---" * (len(COLUMNS) + 1) + "|",
                *(r.line() for r in rows if r.outcome == outcome),
                "",
            ]
    for outcome, title in ((REFUSED, "Refused, and why"), (NOT_BUILT, "Not tried: no small model was built")):
        if counts[outcome]:
            lines += [f"## {title}\n", "| class | kind | why |", "|---|---|---|"]
            lines += [f"| `{r.name}` | {r.kind} | {r.reason} |" for r in rows if r.outcome == outcome]
            lines.append("")
    return "\n".join(lines)


def jobs() -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """Yield name, kind and work of every class."""
    import transformers

    transformers.logging.set_verbosity_error()
    known, names = zoo_cases(), classes()

    def job(name: str, kind: str, make: Callable[[], torch.nn.Module], case: Any = None) -> Any:
        facts = (case.inputs, case.source) if case else (None, None)
        return name, kind, lambda: attempt(name, kind, case.build if case else make, *facts)

    for name, kind in names.items():
        yield job(name, kind, functools.partial(build, getattr(transformers, name)), known.get(name))
    for label, (name, changes) in VARIANTS.items():
        yield job(label, names[name], functools.partial(build, getattr(transformers, name), changes))


def read_rows(kept: Path | None) -> dict[str, Row]:
    """Return the rows of a run that was interrupted, by name."""
    if kept is None or not kept.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in kept.read_text("utf-8").splitlines()]
    return {row.name: row for row in rows}


def main() -> None:
    """Try all classes and write the page; end with an error if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "architectures.md")
    parser.add_argument("--only", nargs="*", default=None, help="names of classes; nothing is written")
    parser.add_argument(
        "--keep", type=Path, default=None, help="JSON lines to add rows to, and to go on from"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    done, rows = read_rows(arguments.keep), list[Row]()
    for name, kind, work in jobs():
        if arguments.only is not None and name not in arguments.only:
            continue
        row = done.get(name) or tried(work, functools.partial(Row, name, kind, WRONG))
        rows.append(row)
        print(f"{row.outcome}: {row.line()}", flush=True)
        if arguments.keep is not None and name not in done:
            with arguments.keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    if arguments.only is None:
        arguments.out.write_text(page(sorted(rows, key=lambda row: row.name)), encoding="utf-8")
        print(f"written: {arguments.out}")
    if wrong := [row.name for row in rows if row.outcome == WRONG]:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
