"""Import rules: allowed imports between packages, no cycles, no torch in config and size; size of the model package."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "cutaway"
ALLOWED_IMPORTS = {
    "config": set(),
    "pretrained": set(),
    "size": {"config", "quantization"},  # format_table.py, which imports no torch
    "cpu_kernels": set(),
    "cuda_kernels": set(),
    "quantization": {"cpu_kernels", "cuda_kernels"},
    "model": {"config", "quantization"},
    "tokenizer": set(),
    "families": {"config", "model", "tokenizer", "quantization"},
    "generate": {"config", "size", "model", "tokenizer", "cpu_kernels", "quantization"},
    "evaluate": {"config", "size", "model", "tokenizer", "generate"},
    # Family tables map module names of transformers models, which lens uses to trace them.
    "lens": {"config", "size", "model", "families", "evaluate"},
    "check": {"config", "size", "model", "tokenizer", "families", "generate", "lens", "evaluate"},
    "train": {"config", "size", "model", "tokenizer", "families", "generate", "lens", "evaluate", "check"},
    "serve": {
        "config",
        "size",
        "model",
        "tokenizer",
        "families",
        "generate",
        "lens",
        "evaluate",
        "check",
        "train",
        "learn",
    },
    "learn": {"config", "size", "model", "tokenizer", "families", "generate", "lens", "evaluate", "check"},
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
        "evaluate",
        "serve",
        "train",
    },
}
IMPORTABLE_ANYWHERE = {
    "argument_checks",
    "bounded_files",
    "callable_module",
    "device",
    "errors",
    "eval_mode",
    "forward_context",
    "pretrained",
    "user_files",
}
MAX_MODEL_CODE_LINES = 1965


def imported_packages(path: Path) -> set[str]:
    """Packages that a file imports, including imports inside functions."""
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == "cutaway":
            names += [f"cutaway.{alias.name}" for alias in node.names]
        packages |= {name.split(".")[1] for name in names if name.startswith("cutaway.")}
    return packages


def test_every_package_has_an_import_rule() -> None:
    assert {
        path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"
    } == ALLOWED_IMPORTS.keys()


@pytest.mark.parametrize("package", ALLOWED_IMPORTS)
def test_packages_import_only_allowed_packages(package: str) -> None:
    for path in (SOURCE / package).rglob("*.py"):
        extra = imported_packages(path) - ALLOWED_IMPORTS[package] - IMPORTABLE_ANYWHERE - {package}
        assert not extra, f"{path.relative_to(SOURCE)} may not import {extra}"


def runtime_imports(body: Sequence[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run when the module is imported, without those in functions and under TYPE_CHECKING."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from runtime_imports(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in ("body", "orelse", "finalbody"):
                yield from runtime_imports(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from runtime_imports(handler.body)


def import_graph() -> dict[str, set[str]]:
    """{module: modules of cutaway that it imports at import time}."""
    paths = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCE.rglob("*.py")
    }
    graph = {}
    for module, path in paths.items():
        imported = set()
        for node in runtime_imports(ast.parse(path.read_text()).body):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            else:  # a submodule, or a name of the package itself
                names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {name if name in paths else str(node.module) for name in names.values()}
        graph[module] = (imported & paths.keys()) - {module}
    return graph


def test_no_import_cycles() -> None:
    graph = import_graph()
    while acyclic := {module for module, imported in graph.items() if not imported & graph.keys()}:
        graph = {module: imported for module, imported in graph.items() if module not in acyclic}
    cycles = {module: sorted(imported & graph.keys()) for module, imported in graph.items()}
    assert not cycles, f"modules in or importing an import cycle: {cycles}"


def code_lines(path: Path) -> int:
    """Number of lines that are not blank, comment or docstring."""
    text = path.read_text()
    docstring_lines = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstring_lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = text.splitlines()
    return sum(
        1
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.strip().startswith("#") and number not in docstring_lines
    )


def test_model_package_is_small() -> None:
    counts = {path.name: code_lines(path) for path in (SOURCE / "model").glob("*.py")}  # without adapters/
    assert sum(counts.values()) <= MAX_MODEL_CODE_LINES, counts


def test_model_does_not_branch_on_model_names() -> None:
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
        "import cutaway as ct; from cutaway.size import count_parameters; count_parameters(ct.config('gpt2'))",
        "import cutaway as ct; ct.size('llama-3-8b', dtype='q4_k').to_dict()",
        "from cutaway.families import families, config_from_hf; config_from_hf({'model_type': 'llama'})",
        "from cutaway.tokenizer import byte_tokenizer",
        "import cutaway as ct; ct.evaluate.entropy([0.5, 0.5]); ct.evaluate.evaluate_calibration([0.5], [1])",
        "from cutaway.learn.exercises import load_exercises; [(e.instructions, e.stub) for e in load_exercises()]",
        "import cutaway.cli.verbs.learn, cutaway.cli.views.exercise_report, cutaway.learn.exercises.progress",
        "import cutaway.learn.runner.limits, cutaway.learn.runner.launcher",
        "from cutaway.cli import app",
    ],
)
def test_statement_imports_no_torch(statement: str) -> None:
    code = f"{statement}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
