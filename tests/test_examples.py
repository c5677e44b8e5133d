"""Every example runs, and says what it says it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mainstem.connections import PreNorm, make_scheme, register, scheme_names
from mainstem.errors import ConfigError

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*args: str) -> str:
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_connection_of_ones_own_balances() -> None:
    said = run(str(EXAMPLES / "own_connection.py"))
    found = re.search(r"(\d+) contributions; .* by (\S+)\n.*embedding: (\S+)", said)
    assert found is not None, said
    assert int(found[1]) == 1 + 2 * 12
    assert float(found[2]) <= 1e-6
    assert float(found[3]) == 1.0


def test_the_picture_is_drawn_from_an_audit(tmp_path: Path) -> None:
    audit = {
        "blocks": [
            {"block": i, "resid_norm_median": 10.0 * 2**i, "attn_write_ratio": 0.5, "mlp_write_ratio": None}
            for i in range(3)
        ],
        "provenance": {"model": {"requested": "tiny"}},
        "loss": {"nll": 3.25, "tokens": 1234},
        "books": {"additivity": 0.0, "continuity": 1e-7},
    }
    source, target = tmp_path / "audit.json", tmp_path / "stream.svg"
    source.write_text(json.dumps(audit))
    run(str(EXAMPLES / "stream_picture.py"), str(source), str(target))
    drawn = target.read_text()
    assert drawn.count("<path") == 3  # one attention write a block, no feed-forward
    assert "tiny, 3 blocks: median norm 10 to 40; loss 3.250 over 1,234 tokens" in drawn
    assert "balance to 1e-07" in drawn


@pytest.mark.slow
def test_a_training_of_ones_own_is_watched(tmp_path: Path) -> None:
    options = ["--steps", "4", "--depth", "3", "--every", "2"]
    said = run(str(EXAMPLES / "monitor_a_training.py"), str(tmp_path), *options)
    assert "3 records of 3 blocks; at step 4 the stream grows" in said
    drawn = (tmp_path / "training.svg").read_text()
    states, writes = 3 * (1 + 2 * 3), 3 * 2 * 3
    updates = 3 * 3
    frames = 1 + 4 + 4 * 20  # the ground, four grids, four scales
    assert drawn.count("<rect") == 2 * states + writes + updates + frames
    assert "3 blocks, steps 1 to 4, 1,024 tokens a step; all finite; books balance to the bit" in drawn


def test_a_package_brings_schemes_by_entry_point(tmp_path: Path) -> None:
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[mainstem.connections]\nbounded_write = own_connection:BoundedWrite\n"
    )
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(EXAMPLES)!r}]\n"
        "from mainstem.connections import scheme_names, make_scheme\n"
        "print('bounded_write' in scheme_names(), make_scheme('bounded_write', scale=2.0).scale)"
    )
    assert run("-c", code) == "True 2.0\n"
    (info / "entry_points.txt").write_text("[mainstem.connections]\nlost = nowhere:Lost\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from mainstem.connections import scheme_names\nfrom mainstem.errors import ConfigError\n"
        "try: scheme_names()\nexcept ConfigError as error: print(error)"
    )
    assert "'lost' of an installed package cannot be loaded from 'nowhere:Lost'" in run("-c", code)


def test_registering_what_is_none_or_taken_is_refused() -> None:
    with pytest.raises(ConfigError, match="no connection scheme"):
        register(int)
    twin = type("Twin", (PreNorm,), {"name": "pre_norm"})
    with pytest.raises(ConfigError, match="taken by PreNorm"):
        register(twin)
    assert register(PreNorm) is PreNorm
    assert type(make_scheme("pre_norm")) is PreNorm
    assert "pre_norm" in scheme_names()
