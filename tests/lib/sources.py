"""The sources of the code that runs on users' hosts, and the calls in them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import gpuhook
import gpuhook_simulate

SOURCE = Path(gpuhook.__file__).parent


def dotted(node: ast.expr) -> str:
    """Return an expression as it is written; plain and dotted names take a fast path."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ast.unparse(node)


def calls(tree: ast.Module) -> Iterator[tuple[str, str, ast.Call]]:
    """Yield (enclosing function, name, call) of every call by a plain or dotted name."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, str, ast.Call]]:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            yield function, dotted(node.func), node
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    yield from visit(tree, "")


def of_all() -> dict[str, str]:
    """Return the sources of all code that runs on a user's host, by name."""
    sources = {str(path.relative_to(SOURCE).with_suffix("")): path for path in SOURCE.rglob("*.py")}
    simulate = Path(gpuhook_simulate.__file__).parent
    sources |= {
        f"simulate/{path.relative_to(simulate).with_suffix('')}": path
        for path in simulate.rglob("*.py")
    }
    image = Path(__file__).parents[2] / "packaging/kubernetes/image"
    sources |= {str(path.relative_to(image.parents[2])): path for path in image.glob("*.py")}
    return {name: path.read_text() for name, path in sources.items()}
