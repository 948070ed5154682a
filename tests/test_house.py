"""The house's own rules: imports point one way, rooms stay small, config and size need no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "cutaway"
MAY_IMPORT = {
    "config": set(),
    "shipped": set(),
    "size": {"config"},
    "model": {"config"},
    "text": set(),
    "families": {"config", "model", "text"},
    "generate": {"config", "size", "model", "text"},
    "measure": {"config", "size", "model", "text", "generate"},
    # A family's table says which modules of another library's model are which of ours: so a lens sees into those too.
    "lens": {"config", "size", "model", "families", "measure"},
    "check": {"config", "size", "model", "text", "families", "generate", "lens", "measure"},
    "train": {"config", "size", "model", "text", "families", "generate", "lens", "measure", "check"},
    "serve": {"config", "size", "model", "text", "families", "generate", "lens", "measure", "train", "learn"},
    "learn": {"config", "size", "model", "text", "families", "generate", "lens", "measure", "check"},
    "bench": {"config", "generate", "size", "model"},
    "cli": {
        "bench",
        "check",
        "config",
        "size",
        "model",
        "families",
        "generate",
        "learn",
        "lens",
        "measure",
        "serve",
        "train",
    },
}
EVERYWHERE = {"errors", "callable_module", "shipped"}


def imports_of(path: Path) -> set[str]:
    """The rooms that a file imports, inside functions too."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == "cutaway":
            names += [f"cutaway.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("cutaway.")}
    return rooms


def test_every_room_has_its_rule() -> None:
    assert {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"} == MAY_IMPORT.keys()


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_point_one_way(room: str) -> None:
    for path in (SOURCE / room).rglob("*.py"):
        extra = imports_of(path) - MAY_IMPORT[room] - EVERYWHERE - {room}
        assert not extra, f"{path.relative_to(SOURCE)} may not import {extra}"


def code_lines(path: Path) -> int:
    """Lines that are neither blank, comment nor docstring."""
    text = path.read_text()
    spoken = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            spoken |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = text.splitlines()
    return sum(
        1 for n, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#") and n not in spoken
    )


def test_the_model_can_be_read_in_an_hour() -> None:
    counts = {path.name: code_lines(path) for path in (SOURCE / "model").glob("*.py")}
    assert sum(counts.values()) <= 1720, counts
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 310, path


def test_no_branch_on_a_models_name() -> None:
    names = ("gpt", "llama", "bert", "qwen", "gemma", "mistral", "falcon", "bloom", "deepseek", "bart", "marian")
    for path in (SOURCE / "model").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare | ast.MatchValue):
                text = ast.unparse(node).lower()
                assert not any(name in text for name in names), f"{path.name}: {text}"


@pytest.mark.parametrize(
    "statement",
    [
        "import cutaway",
        "import cutaway as ct; ct.config('llama-3-8b'); ct.presets()",
        "from cutaway.size.params import count; from cutaway.config import config; count(config('gpt2'))",
        "from cutaway.families import families, read_config; read_config({'model_type': 'llama'})",
        "from cutaway.text import byte_tokenizer",
        "import cutaway as ct; ct.measure.entropy([0.5, 0.5]); ct.measure.calibration([0.5], [1])",
        "from cutaway.learn.exercises import exercises; [(e.task, e.stub, e.hints) for e in exercises()]",
        "import cutaway.cli.learn_check, cutaway.cli.learn_view, cutaway.learn.record, cutaway.learn.guard",
        "from cutaway.cli import app",
    ],
)
def test_torch_is_not_imported_for(statement: str) -> None:
    code = f"{statement}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
