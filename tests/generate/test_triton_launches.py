"""Triton kernels are launched with the arguments that they have: read from the source, so that no GPU is needed."""

import ast
from pathlib import Path

import pytest

import cutaway.generate

FAST = Path(cutaway.generate.__file__).parent / "fast"
TREES = {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(FAST.glob("*.py"))}
LAUNCH_OPTIONS = {"num_warps", "launch_pdl"}
"""Keywords that Triton itself takes."""
KERNELS = {
    node.name: [each.arg for each in node.args.args]
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef) and "triton.jit" in map(ast.unparse, node.decorator_list)
}
"""The parameters of each kernel and of what kernels call."""


def option_keys(tree: ast.Module) -> set[str]:
    """Keys of dict literals that are passed on as constants of a kernel, which are the ones in capitals."""
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
def test_launch_arguments_are_the_kernels(launch: ast.Call, options: set[str]) -> None:
    """Each keyword is a parameter, none is given twice, and none is left out."""
    assert isinstance(launch.func, ast.Subscript)
    parameters = KERNELS[ast.unparse(launch.func.value)]
    keywords = {each.arg for each in launch.keywords if each.arg is not None} - LAUNCH_OPTIONS
    unpacks = any(each.arg is None and ast.unparse(each.value) != "pdl_options()" for each in launch.keywords)
    by_name = set(parameters[len(launch.args) :])
    assert keywords <= by_name
    assert by_name - keywords <= (options if unpacks else set())


@pytest.mark.parametrize("file", [file for file, tree in TREES.items() if option_keys(tree)])
def test_option_keys_are_parameters_of_kernels(file: str) -> None:
    assert option_keys(TREES[file]) <= {name for parameters in KERNELS.values() for name in parameters}
