"""Triton kernel launches pass the kernels' parameters; checked in the source, without a GPU."""

import ast
from pathlib import Path

import pytest

import cutaway.generate

FAST = Path(cutaway.generate.__file__).parent / "fast"
TREES = {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(FAST.glob("*.py"))}
LAUNCH_OPTIONS = {"num_warps", "launch_pdl"}
"""Launch options of Triton itself."""
KERNELS = {
    node.name: [item.arg for item in node.args.args]
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef) and "triton.jit" in map(ast.unparse, node.decorator_list)
}
"""Parameters of each jitted function."""


def option_keys(tree: ast.Module) -> set[str]:
    """Upper-case keys of dict literals, which are passed as constants of a kernel."""
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    return {key.value for key in keys if isinstance(key, ast.Constant) and str(key.value).isupper()}


LAUNCHES = [
    pytest.param(node, option_keys(tree), id=f"{file}:{node.lineno}")
    for file, tree in TREES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and ast.unparse(node.func.value) in KERNELS
]


def test_launches_are_found() -> None:
    launched = {ast.unparse(launch.values[0].func.value) for launch in LAUNCHES}  # type: ignore[attr-defined]
    assert launched == {name for name in KERNELS if name.endswith("_kernel")}


@pytest.mark.parametrize(("launch", "options"), LAUNCHES)
def test_launch_arguments_match_kernel_parameters(launch: ast.Call, options: set[str]) -> None:
    """Each keyword is a parameter, none is passed twice, none is missing."""
    assert isinstance(launch.func, ast.Subscript)
    parameters = KERNELS[ast.unparse(launch.func.value)]
    keywords = {item.arg for item in launch.keywords if item.arg is not None} - LAUNCH_OPTIONS
    unpacks = any(item.arg is None and ast.unparse(item.value) != "pdl_options()" for item in launch.keywords)
    by_name = set(parameters[len(launch.args) :])
    assert keywords <= by_name
    assert by_name - keywords <= (options if unpacks else set())


@pytest.mark.parametrize("file", [file for file, tree in TREES.items() if option_keys(tree)])
def test_option_keys_are_kernel_parameters(file: str) -> None:
    assert option_keys(TREES[file]) <= {name for parameters in KERNELS.values() for name in parameters}
