"""Figures of the house: how much code there is, how it hangs together, and what is left to tidy up.

    python tools/house.py            print the figures beside their limits, circles of imports, longest files and functions
    python tools/house.py --lower    lower each limit in tools/house.json to the figure of now
    python tools/house.py --json     print the figures as JSON

A limit may only go down, unless a commit raises it in tools/house.json and says why there ("why"). A test compares
(tests/tools/test_house.py).
"""

import argparse
import ast
import dataclasses
import functools
import gc
import io
import json
import re
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "quire"
LIMITS = Path(__file__).with_name("house.json")
LONG_FUNCTION = 40
WORD = re.compile(r"\w+")
ROUNDING = {"statements": 100, "tools_lines": 100}
"""A lowered limit is rounded up to a multiple of this, so that two small changes beside one another do not collide."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Definition = FunctionNode | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class Module:
    """One file of the package: its dotted name, its text and its syntax tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def read_modules(package: Path) -> dict[str, Module]:
    """Every module of a package, by dotted name."""
    modules = {}
    gc.disable()  # trees are large and all of them stay: looking through them for garbage took four fifths of the time
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, text, ast.parse(text, str(path)))
    gc.enable()
    return modules


# --- size ---


def has_docstring(node: ast.AST) -> bool:
    return isinstance(node, (ast.Module, *DEFINITIONS)) and ast.get_docstring(node, clean=False) is not None


def count_statements(nodes: Collection[ast.AST]) -> int:
    """Statements among all nodes of a syntax tree, without docstrings."""
    return sum(isinstance(node, ast.stmt) for node in nodes) - sum(map(has_docstring, nodes))


def functions_of(module: Module) -> Iterator[FunctionNode]:
    return (node for node in module.nodes if isinstance(node, FUNCTIONS))


def count_lines(function: FunctionNode) -> int:
    """Lines from `def` to the last one, without the docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if has_docstring(function):
        first = function.body[0]
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def is_kernel(function: FunctionNode) -> bool:
    """Whether Triton compiles or interprets it: `@triton.jit`, `@gluon.jit(...)`, `@triton.constexpr_function`."""
    marks = (mark.func if isinstance(mark, ast.Call) else mark for mark in function.decorator_list)
    return any(isinstance(mark, ast.Attribute) and mark.attr in ("jit", "constexpr_function") for mark in marks)


def typed_parameters(functions: Iterable[FunctionNode]) -> list[ast.arg]:
    """Parameters that should have a type: not `self` and `cls`, and none of what Triton compiles."""
    found: list[ast.arg | None] = []
    for function in functions:
        given = function.args
        if not is_kernel(function):
            found += [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [one for one in found if one is not None and one.arg not in ("self", "cls")]


def count_format_skips(text: str) -> int:
    """Comments that turn the formatter off."""
    marks = ("fmt: skip", "fmt: off")
    if not any(mark in text for mark in marks):
        return 0
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and any(mark in token.string for mark in marks) for token in tokens)


# --- imports ---


def absolute_base(module: Module, node: ast.ImportFrom) -> str:
    """The module that a `from … import` names, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def imports_of(module: Module, modules: Iterable[str]) -> set[str]:
    """Modules of the package that a module imports anywhere, also within functions and for type checking only. A name that
    is itself a module counts as that module, not as the package that holds it."""
    known, found = set(modules), set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(module, node)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found |= {name} if name in known else {base} & known
    return found


def import_circles(modules: dict[str, Module]) -> list[list[str]]:
    """Groups of modules that import one another, directly or by way of others, the largest first; a module that imports itself
    is one too. The package's own face, which names everything, is left out."""
    face = min(modules, key=len)
    graph = {name: imports_of(module, modules) - {face} for name, module in modules.items() if name != face}
    groups = [sorted(group) for group in strong_components(graph)]
    circles = [group for group in groups if len(group) > 1 or group[0] in graph[group[0]]]
    return sorted(circles, key=lambda group: (-len(group), group))


def strong_components(graph: dict[str, set[str]]) -> list[set[str]]:
    """Tarjan's strongly connected components, without recursion."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []
    for root in graph:
        if root in number:
            continue
        calls = [(root, iter(sorted(graph[root])))]
        number[root] = lowest[root] = len(number)
        path.append(root)
        while calls:
            node, rest = calls[-1]
            for other in rest:
                if other not in number:
                    number[other] = lowest[other] = len(number)
                    path.append(other)
                    calls.append((other, iter(sorted(graph[other]))))
                    break
                if other in path:
                    lowest[node] = min(lowest[node], number[other])
            else:
                calls.pop()
                if calls:
                    lowest[calls[-1][0]] = min(lowest[calls[-1][0]], lowest[node])
                if lowest[node] == number[node]:
                    start = path.index(node)
                    found.append(set(path[start:]))
                    del path[start:]
    return found


def floors_of(pyproject: Path) -> dict[str, int]:
    """The floor of each room, from the import-linter's contract of layers: 0 is the highest."""
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {room.strip(): floor for floor, rooms in enumerate(layers) for room in rooms.split(":")}


def repeated_names(modules: dict[str, Module], floors: dict[str, int]) -> list[str]:
    """File names that two rooms have on one floor or on neighbouring ones. Files of one room may share a name: a kernel's
    families are called alike on every side, and Python chose `__main__`."""
    places: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for name, module in modules.items():
        room = next((room for room in floors if name == room or name.startswith(room + ".")), None)
        if room is not None and not module.is_package and module.path.stem != "__main__":
            places[module.path.stem].add((".".join(room.split(".")[:2]), floors[room]))
    return sorted(
        stem
        for stem, found in places.items()
        if any(one != other and abs(floor - other_floor) <= 1 for one, floor in found for other, other_floor in found)
    )


# --- use ---


def words_of(texts: Iterable[str]) -> Counter[str]:
    """How often each word stands in some texts."""
    return Counter(word for text in texts for word in WORD.findall(text))


def names_used_nowhere(modules: dict[str, Module], words: Counter[str]) -> list[str]:
    """Functions and classes whose name stands nowhere but where they are defined. What a decorator may register is left out; what
    a library calls by its name (a hook, a visitor) is among them."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, module in modules.items():
        for node in module.nodes:
            if isinstance(node, DEFINITIONS) and not node.name.startswith("__") and not is_registered(node):
                places[node.name].append(f"{name}.{node.name}")
    return sorted(place for name, found in places.items() if words[name] == len(found) for place in found)


def is_registered(node: Definition) -> bool:
    plain = ("property", "classmethod", "staticmethod", "contextmanager", "contextlib.contextmanager")
    return any(ast.unparse(mark) not in plain for mark in node.decorator_list)


def project_texts() -> Iterator[str]:
    """Every file that may name something of the package."""
    for folder in ("src", "tests", "tools", "bench", "docs", "examples"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".json", ".toml") and "results" not in path.parts:
                yield path.read_text(encoding="utf-8")


# --- exported names ---


def exported_names(modules: dict[str, Module]) -> Iterator[tuple[str, bool]]:
    """Names that a module lists in `__all__`, and the public methods of the classes among them; whether each has a
    docstring."""
    seen: set[tuple[str, str]] = set()
    for module in modules.values():
        for name in listed_names(module):
            found = find_definition(modules, module.name, name)
            if found is None or (found[0], found[1].name) in seen:
                continue
            place, node = found
            seen.add((place, node.name))
            yield f"{place}.{node.name}", has_docstring(node)
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, FUNCTIONS) and not method.name.startswith("_") and not is_override(method):
                        yield f"{place}.{node.name}.{method.name}", has_docstring(method)


def is_override(method: FunctionNode) -> bool:
    """Setters and overloads: the getter and the implementation have the text."""
    marks = {
        mark.attr if isinstance(mark, ast.Attribute) else getattr(mark, "id", "") for mark in method.decorator_list
    }
    return bool(marks & {"setter", "overload"})


def listed_names(module: Module) -> list[str]:
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
            return [item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant)]
    return []


def find_definition(modules: dict[str, Module], place: str, name: str) -> tuple[str, Definition] | None:
    """Where a name is defined as a class or a function: in the module itself or, through imports, in another."""
    module = modules.get(place)
    if module is None:
        return None
    for node in module.nodes:
        if isinstance(node, DEFINITIONS) and node.name == name and node in module.tree.body:
            return place, node
        if isinstance(node, ast.ImportFrom) and absolute_base(module, node) != place:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find_definition(modules, absolute_base(module, node), alias.name)
    return None


# --- figures ---


def measure(modules: dict[str, Module], tools: Path, floors: dict[str, int], words: Counter[str]) -> dict[str, int]:
    """The figures that have limits; smaller is better in all of them. Counts, not shares: a share grows when good code is
    deleted."""
    functions = [function for module in modules.values() for function in functions_of(module)]
    long = [function for function in functions if count_lines(function) > LONG_FUNCTION]
    circles = import_circles(modules)
    return {
        "statements": sum(count_statements(module.nodes) for module in modules.values()),
        "files": len(modules),
        "circles": len(circles),
        "modules_in_circles": sum(map(len, circles)),
        "longest_file": max(len(module.text.splitlines()) for module in modules.values()),
        "longest_function": max(map(count_lines, functions)),
        "functions_over_40_lines": len(long),
        "untyped_parameters": sum(one.annotation is None for one in typed_parameters(functions)),
        "undocumented_exports": sum(not has for _, has in exported_names(modules)),
        "format_skips": sum(count_format_skips(module.text) for module in modules.values()),
        "names_used_nowhere": len(names_used_nowhere(modules, words)),
        "repeated_file_names": len(repeated_names(modules, floors)),
        "tools_lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tools.rglob("*.py")),
    }


def worse_figures(figures: dict[str, int], limits: dict[str, int]) -> list[str]:
    """A sentence for each figure above its limit."""
    return [
        f"{name} is {figure} and may be {limits[name]} at most: lower it, or raise its limit in {LIMITS.name} and say why"
        for name, figure in figures.items()
        if figure > limits[name]
    ]


def read_limits(path: Path = LIMITS) -> dict[str, int]:
    return json.loads(path.read_text(encoding="utf-8"))["limits"]


def lower_limits(figures: dict[str, int], path: Path = LIMITS) -> None:
    """Write the figures as limits where they are smaller."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    for name, figure in figures.items():
        step = ROUNDING.get(name)
        limit = -(-figure // step) * step if step else figure
        kept["limits"][name] = min(limit, kept["limits"].get(name, limit))
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def print_details(modules: dict[str, Module], floors: dict[str, int], words: Counter[str], count: int) -> None:
    files = sorted(((len(one.text.splitlines()), name) for name, one in modules.items()), reverse=True)
    functions = sorted(
        ((count_lines(node), f"{name}.{node.name}") for name, one in modules.items() for node in functions_of(one)),
        reverse=True,
    )
    rooms: dict[str, int] = defaultdict(int)
    for name, module in modules.items():
        rooms[".".join(name.split(".")[:2]) if name.count(".") > 1 or module.is_package else "files of the root"] += (
            count_statements(module.nodes)
        )
    nodes = [node for one in modules.values() for node in functions_of(one)]
    shares = {
        "functions over 40 lines": [count_lines(node) > LONG_FUNCTION for node in nodes],
        "parameters with a type (Triton's kernels apart)": [
            one.annotation is not None for one in typed_parameters(nodes)
        ],
        "exported names with a docstring": [has for _, has in exported_names(modules)],
    }
    tables = {
        "shares": [f"{100 * sum(hits) / max(1, len(hits)):6.2f} %  {name}" for name, hits in shares.items()],
        "statements by room": [f"{size:6d}  {room}" for size, room in sorted(((n, r) for r, n in rooms.items()))[::-1]],
        "circles of imports": ["  " + " ".join(circle) for circle in import_circles(modules)],
        "longest files (lines)": [f"{size:6d}  {name}" for size, name in files[:count]],
        "longest functions (lines)": [f"{size:6d}  {name}" for size, name in functions[:count]],
        "names used nowhere": [f"  {name}" for name in names_used_nowhere(modules, words)],
        "exported names without a docstring": [f"  {name}" for name, has in exported_names(modules) if not has],
        "file names on neighbouring floors": ["  " + " ".join(repeated_names(modules, floors))],
    }
    for title, lines in tables.items():
        print(f"\n{title}")
        print("\n".join(lines) or "  none")


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="lower the limits to the figures of now")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument(
        "--longest", type=int, default=10, metavar="N", help="files and functions to list (default: 10)"
    )
    args = parser.parse_args(given)
    modules, floors = read_modules(PACKAGE), floors_of(ROOT / "pyproject.toml")
    words = words_of(project_texts())
    figures = measure(modules, ROOT / "tools", floors, words)
    if args.json:
        print(json.dumps(figures, indent=2))
        return 0
    if args.lower:
        lower_limits(figures)
    limits = read_limits()
    print(f"{'figure':<26}{'now':>10}{'limit':>10}")
    for name, figure in figures.items():
        print(f"{name:<26}{figure:>10}{limits[name]:>10}{'  above its limit' if figure > limits[name] else ''}")
    print_details(modules, floors, words, args.longest)
    return bool(worse_figures(figures, limits))


if __name__ == "__main__":
    sys.exit(main())
