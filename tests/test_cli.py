"""The command as people use and misuse it: one sentence and a status for every mistake, and no half files."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import torch
import transformers

import mainstem
from interrupts import interrupt
from mainstem import cli
from mainstem.audit.schema_page import load_schema

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS / "audit"), str(TESTS / "sources")]
tiny = importlib.import_module("tiny_models")

SMALL = ("--tokens", "90", "--window", "16")


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the command in this process, in an empty folder."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setenv("COLUMNS", "100")

    def command(*args: object) -> Ran:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["mainstem", *map(str, args)])
        code: object = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = leaving.code or 0
        assert isinstance(code, int)
        return Ran(code, *capsys.readouterr())

    return command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny.make("llama", tmp_path_factory.mktemp("cli"))


def process(*args: object, code: str = "", **options: Any) -> subprocess.Popen[str]:
    """The command in a process of its own, after ``code``."""
    start = [sys.executable, "-c", f"{code}\nfrom mainstem.cli import main\nmain()", *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    return subprocess.Popen(start, **{**pipes, **options})


# what it prints and writes


def test_an_audit_prints_a_table_and_writes_three_files(run: Run, folder: Path, tmp_path: Path) -> None:
    ran = run("audit", folder, "--text", tiny.GPL, *SMALL, "--out", tmp_path / "out")
    assert ran.code == 0
    assert ran.out.count("model.layers") == 0
    assert "7 Which blocks can go?" in ran.out
    assert ran.out.rstrip().splitlines()[-3:] == [
        f"wrote {tmp_path / 'out' / name}" for name in ("audit.json", "audit.csv", "report.html")
    ]
    assert "reading the stream 0/2\n" in ran.err
    found = json.loads((tmp_path / "out" / "audit.json").read_text("utf-8"))
    jsonschema.validate(found, load_schema())
    assert len((tmp_path / "out" / "audit.csv").read_text("utf-8").splitlines()) == 1 + 3


def test_a_word_and_a_probe_can_be_asked_for(run: Run, folder: Path) -> None:
    options = ("--tokens", "400", "--window", "16", "--json", "--probe", "--attribute", "e,a")
    ran = run("audit", folder, "--text", tiny.GPL, "--only", "identity,answer", "--no-lens", *options)
    found = json.loads(ran.out)
    assert [found["attribution"][key] for key in ("token", "against")] == ["e", "a"]
    assert found["probe"]["num_text"] > 50


def test_the_folder_has_a_name_by_default(run: Run, folder: Path) -> None:
    assert run("audit", folder, "--text", tiny.GPL, *SMALL, "--no-lens").code == 0
    assert sorted(p.name for p in Path("audit-llama").iterdir()) == ["audit.csv", "audit.json", "report.html"]


def test_json_is_all_there_is_on_standard_output(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = importlib.import_module("mainstem.audit.run").load_model

    def talkative(*args: Any, **kwargs: Any) -> Any:
        print("Hello from a model's own code")
        return load(*args, **kwargs)

    monkeypatch.setattr("mainstem.audit.run.load_model", talkative)
    ran = run("audit", folder, "--text", tiny.GPL, *SMALL, "--json")
    assert ran.code == 0
    found = json.loads(ran.out)
    assert found["schema"] == "mainstem.audit/1"
    assert "Hello" in ran.err
    assert list(Path.cwd().iterdir()) == []
    ran = run("audit", folder, "--text", tiny.GPL, *SMALL, "--json", "--out", "both")
    assert json.loads(ran.out)["blocks"] == json.loads(Path("both/audit.json").read_text("utf-8"))["blocks"]


@pytest.mark.parametrize("tokens", [0, "all"])
def test_all_tokens_are_the_whole_text(run: Run, folder: Path, tokens: object) -> None:
    text = "text:the quick brown fox jumps over the lazy dog"
    found = json.loads(run("audit", folder, "--text", text, "--tokens", tokens, "--window", 8, "--json").out)
    whole = tiny.tokenizer()(text.removeprefix("text:"), add_special_tokens=False)["input_ids"]
    assert found["provenance"]["text"]["num_tokens"] == len(whole)


def test_inspect(run: Run, folder: Path) -> None:
    ran = run("inspect", folder)
    assert ran.code == 0
    assert ran.out.splitlines()[0] == "3 blocks, 6 sublayers, width 16, to logits"
    assert "model.layers.2  attn (carry: identity); mlp (carry: identity)" in ran.out
    found = json.loads(run("inspect", folder, "--json").out)
    assert [b["module"] for b in found["blocks"]] == [f"model.layers.{i}" for i in range(3)]
    assert [s["writes"][0]["module"] for s in found["blocks"][1]["sublayers"]] == [
        "model.layers.1.self_attn",
        "model.layers.1.mlp",
    ]


@pytest.mark.parametrize("verb", [(), ("audit",), ("inspect",), ("convert",), ("diff",), ("prune",)])
def test_every_help_has_an_example(run: Run, verb: tuple[str, ...]) -> None:
    ran = run(*verb, "--help")
    assert ran.code == 0
    assert f"Example:  mainstem {verb[0] if verb else 'audit'} smollm2" in ran.out


def test_a_report_of_a_saved_audit(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--only", "books,growth", "--no-report", "--out", out)
    assert run("audit", folder, "--text", tiny.GPL, *SMALL, *options).code == 0
    assert sorted(p.name for p in out.iterdir()) == ["audit.csv", "audit.json"]
    page = tmp_path / "page.html"
    ran = run("report", out, out / "audit.json", "--out", page)
    assert (ran.code, ran.out) == (0, f"wrote {page}\n")
    assert "How does the stream grow?" in page.read_text("utf-8")
    ran = run("report", out, out, out)
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "3 audits were given" in ran.err


def test_a_report_has_a_place(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    ran = run("audit", folder, "--text", tiny.GPL, *SMALL, "--out", tmp_path / "out")
    assert ran.code == 1
    assert "report.html is a folder" in ran.err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["report.html"]


def test_version(run: Run) -> None:
    assert run("--version").out.startswith(f"mainstem {mainstem.__version__}, torch {torch.__version__}")


# mistakes


def _text(tmp_path: Path, words: str) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(words)
    return path


def _nan_weights(tmp_path: Path) -> Path:
    model = transformers.LlamaForCausalLM.from_pretrained(tiny.make("llama", tmp_path))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    return tiny.save(model, tmp_path / "nan")


def _too_large_for_float16(tmp_path: Path) -> Path:
    model = transformers.LlamaForCausalLM.from_pretrained(tiny.make("llama", tmp_path))
    with torch.no_grad():
        for matrix in model.model.layers[1].mlp.parameters():
            matrix.mul_(1e3)
    return tiny.save(model, tmp_path / "large")


def _vit(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=8, patch_size=4)
    )
    model.save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def _other_tokenizer(tmp_path: Path) -> Path:
    config = importlib.import_module("tiny_sources").llama_config(vocab_size=200)
    return tiny.save(transformers.LlamaForCausalLM(config), tmp_path / "other")


def _no_stream(tmp_path: Path) -> Path:
    sizes = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.Inkling2TextConfig(
        **sizes, unpadded_vocab_size=384, num_key_value_heads=2, head_dim=16, swa_num_attention_heads=2,
        swa_num_key_value_heads=2, swa_head_dim=16, sliding_window_size=4, d_rel=4, rel_extent=8,
        intermediate_size=32, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return tiny.save(transformers.Inkling2ForCausalLM(config), tmp_path / "inkling")


Mistake = tuple[Callable[[Path], object], tuple[object, ...], str]
LLAMA: Callable[[Path], object] = lambda tmp: tiny.make("llama", tmp)  # noqa: E731
MISTAKES: dict[str, Mistake] = {
    "no such folder": (lambda _: "./nowhere", (), "No such model: there is no file or folder './nowhere'."),
    "no such hub model": (lambda _: "no-one/nothing", (), "No such model here: 'no-one/nothing' is no file"),
    "empty text": (LLAMA, ("--text", "text:  "), "The text is empty"),
    "no such text": (LLAMA, ("--text", "./gone.txt"), "There is no file or folder './gone.txt'."),
    "one token": (LLAMA, ("--text", "text:a"), "is 1 token(s) long; at least two are needed."),
    "not a language model": (_vit, (), "is no language model that mainstem can load: it is a ViTFor"),
    "nan weights": (_nan_weights, (), "model.layers.1.mlp.up_proj.weight"),
    "float16 overflow": (
        _too_large_for_float16,
        ("--dtype", "float16"),
        "Its activations are not finite from block 1 (mlp[1]), token",
    ),
    "another model's tokenizer": (_other_tokenizer, (), "the model has embeddings for 200 tokens"),
    "no stream": (_no_stream, (), "stream"),
    "unknown dtype": (LLAMA, ("--dtype", "int3"), "Unknown dtype 'int3'. Choose one of: auto, float32"),
    "unknown device": (LLAMA, ("--device", "abacus"), "The device 'abacus' cannot be used here"),
    "unknown first token": (LLAMA, ("--first-token", "no such word"), "is not one token"),
    "window beyond positions": (
        LLAMA,
        ("--window", "65"),
        "longer than the model's 64 positions; use --window 64.",
    ),
    "tokens 1": (LLAMA, ("--tokens", "1"), "an audit of 1 token(s) was asked for; at least 2 are needed."),
    "tokens -5": (LLAMA, ("--tokens", "-5"), "an audit of -5 token(s) was asked for; at least 2 are needed."),
    "window 1": (LLAMA, ("--window", "1"), "a window of 1 token(s) was asked for; it must hold at least 2."),
    "batch size 0": (LLAMA, ("--batch-size", "0"), "batch_size is 0; it must be at least 1."),
    "several tokens to attribute": (
        LLAMA,
        ("--attribute", "no such word"),
        "attribute is 'no such word', which is",
    ),
    "a probe of no question": (
        LLAMA,
        ("--probe", "--only", "growth"),
        "a probe belongs to the question 'identity'; name it in --only.",
    ),
    "out below a file": (LLAMA, ("--out", f"{__file__}/out"), "is a file, so no results can be put in"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(name: str, run: Run, tmp_path: Path) -> None:
    model, options, says = MISTAKES[name]
    ran = run("audit", model(tmp_path), "--text", tiny.GPL, *SMALL, "--out", tmp_path / "out", *options)
    *progress, last = ran.err.rstrip().splitlines()
    print(f"{name}: {last}")
    assert ran.code == 1
    assert ran.out == ""
    assert last.startswith("mainstem: ")
    assert says in last
    assert "Traceback" not in ran.err
    assert all(len(line) < 100 for line in progress if "Writing model" not in line)
    assert not (tmp_path / "out").exists()
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("device", ["cuda:63", "meta"])
@pytest.mark.parametrize("verb", ["audit", "inspect"])
def test_a_device_that_is_not_there(run: Run, folder: Path, verb: str, device: str) -> None:
    ran = run(verb, folder, *(("--text", tiny.GPL) if verb == "audit" else ()), "--device", device, "--json")
    assert ran.code == 1
    assert ran.out == ""
    assert f"The device '{device}' cannot be used here" in ran.err
    assert len(ran.err.splitlines()) == 1


def test_books_that_do_not_balance(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that changes the stream in place behind the back of the block that made it."""
    load = importlib.import_module("mainstem.audit.run").load_model

    def tampered(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        calls: list[int] = []

        def tamper(module: Any, inputs: Any, output: Any) -> None:
            calls.append(1)
            if len(calls) > 4:
                torch.ops.aten.mul_(output[0] if isinstance(output, tuple) else output, 1.01)

        loaded.model.model.layers[1].register_forward_hook(tamper)
        return loaded

    monkeypatch.setattr("mainstem.audit.run.load_model", tampered)
    ran = run("audit", folder, "--text", tiny.GPL, *SMALL, "--json")
    assert ran.code == 1
    assert ran.out == ""
    last = ran.err.rstrip().splitlines()[-1]
    print(last)
    assert last.startswith("mainstem: The books of this model do not balance: continuity is off by")
    assert "at block 2" in last
    assert "No figure is given." in last


@pytest.mark.parametrize(("args", "says"), [(("audit", "--colour"), "--colour"), (("adit",), "adit")])
def test_what_the_command_does_not_know(run: Run, args: tuple[str, ...], says: str) -> None:
    ran = run(*args)
    assert ran.code == 2
    assert says in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("package", ["typer", "rich", "transformers"])
def test_a_missing_extra_names_the_install_command(package: str, folder: Path, tmp_path: Path) -> None:
    block = f"import sys; sys.modules[{package!r}] = None"
    ran = process("audit", folder, "--text", tiny.GPL, *SMALL, "--json", code=block, cwd=tmp_path)
    out, err = ran.communicate(timeout=60)
    assert ran.returncode == 1
    assert out == ""
    last = err.rstrip().splitlines()[-1]
    assert last.startswith("mainstem: ")
    assert f"needs the package '{package}', which is not installed" in last
    assert "pip install 'mainstem[hf]'" in last
    assert "Traceback" not in err


def test_an_interruption_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text(tiny.GPL.read_text("utf-8") * 20)
    options = ("--tokens", 0, "--window", 16, "--batch-size", 1, "--out", tmp_path / "out")
    ran = process("audit", folder, "--text", long, *options)
    assert ran.stderr is not None
    seen: list[str] = []
    begin = time.monotonic()
    while time.monotonic() - begin < 60 and not any("reading the stream 3/" in line for line in seen):
        seen.append(ran.stderr.readline())
    out, err = interrupt(ran)
    assert ran.returncode == 130
    assert out == ""
    assert err.rstrip().endswith("mainstem: interrupted; no file is half written.")
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert json.loads(run("audit", folder, "--text", tiny.GPL, *SMALL, "--json").out)["books"]["passes"] == 4
    shown = terminal.getvalue()
    assert "reading the stream" in shown
    assert "━" in shown
    assert "\x1b[2K" in shown  # and is wiped at the end
    assert "reading the stream 0/2\n" not in shown


def test_a_reader_that_goes_away(folder: Path, tmp_path: Path) -> None:
    ran = process("audit", folder, "--text", tiny.GPL, *SMALL, "--json", cwd=tmp_path)
    assert ran.stdout is not None
    assert ran.stderr is not None
    ran.stdout.close()
    err = ran.stderr.read()
    ran.stderr.close()
    assert ran.wait(timeout=60) == 1
    assert "Traceback" not in err
    assert "Exception ignored" not in err


def test_standard_output_on_a_full_disk(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        ran = run("inspect", folder)
    assert ran.code == 1
    assert ran.err == "mainstem: Standard output cannot be written (No space left on device).\n"


def test_an_interrupted_audit_goes_on(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = importlib.import_module("mainstem.audit._passes")
    one_batch, seen = passes.Passes._batch, list[int]()

    def pressed(self: Any, window: Any) -> None:
        if window.first_sequence == 80 and 80 not in seen:
            seen.append(80)
            raise KeyboardInterrupt
        seen.append(window.first_sequence)
        one_batch(self, window)

    monkeypatch.setattr(passes.Passes, "_batch", pressed)
    options = ("--text", tiny.GPL, "--tokens", 16 * 100, "--window", 16, "--out", tmp_path / "out")
    ran = run("audit", folder, *options)
    assert ran.code == 130
    assert ran.err.endswith(
        "mainstem: interrupted; the same command goes on after batch 16, and with --fresh it begins again.\n"
    )
    ran = run("audit", folder, *options, "--window", 8)
    assert ran.code == 1
    assert "options.window was 16, now 8" in ran.err
    seen[:] = [80]
    assert run("audit", folder, *options).code == 0
    assert seen == [80, *range(64, 100, 4)]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["audit.csv", "audit.json", "report.html"]
