"""The structure of the package, read from its source: who may import whom, how large things may grow, what is named.

Each test gathers every finding and prints one line for each, with file and line, so that a failure says what to move.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "nemotron_mamba2"

# A file imports only what stands above it. A folder counts as one entry; inside it, there are no cycles.
ORDER = [
    "errors",
    "spellings",
    "config",
    "formats",
    "weights",
    "batch",
    "names",
    "checkpoint",
    "ops",
    "plan",
    "state",
    "layer",
    "projection",
    "model",
    "graph",
    "sampling",
    "chat",
    "decoding",
    "generate",
    "quantize",
    "engine",
    "server",
    "adapters",
    "bench",
    "cli",
    "__init__",
    "__main__",
]

# Where a thing may be used, and nowhere else.
THIRD_PARTY_HOMES = {
    "triton": ("ops/gpu/",),
    "cuda": ("ops/gpu/",),
    "transformers": ("adapters/",),
    "starlette": ("server/",),
    "fastapi": ("server/",),
    "uvicorn": ("server/",),
    "huggingface_hub": ("checkpoint",),
    "click": ("cli/",),
    "rich": ("cli/",),
}
ENVIRONMENT_HOMES = ("config.py",)
CUDA_GRAPH_HOMES = ("graph.py",)
# Imports inside functions: the lazy back end, the lazy package surface, and optional packages.
LOCAL_IMPORT_HOMES = ("ops/__init__.py", "__init__.py", "server/", "adapters/", "cli/")
LOCAL_IMPORTS_ANYWHERE = ("huggingface_hub",)  # optional, and asked for only when a hub id is given
PUBLIC_NAMES_ONLY = ("server/", "adapters/")

FILE_LINES, KERNEL_FILE_LINES = 400, 600
FUNCTION_LINES, KERNEL_LINES = 60, 150
POSITIONAL_ARGUMENTS = 3  # but not where arguments are an equation's operands, in its order:
OPERANDS = ("ops/", "layer.py")

FORBIDDEN_CLASSES = re.compile(r"^Base[A-Z]|(Manager|Utils|Helper)$")
FORBIDDEN_ARGUMENTS = {"ctx", "params"}


class Source:
    """One file of the package."""

    def __init__(self, file: Path) -> None:
        self.path = file.relative_to(PACKAGE).as_posix()
        self.text = file.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text, self.path)

    @property
    def entry(self) -> str:
        """Its place in ORDER: the folder, or the file without suffix."""
        return self.path.split("/")[0].removesuffix(".py")

    @property
    def module(self) -> str:
        """Dotted name below the package: "ops.reference"; "" is the package itself."""
        return ".".join(part for part in self.path.removesuffix(".py").split("/") if part != "__init__")

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, absolute dotted name) of every import, `from x import y` as x.y."""
        package = self.path.split("/")[:-1]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = ["nemotron_mamba2", *package][: len(package) + 2 - node.level]
                    base = ".".join([*above, base] if base else above)
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)

    def functions(self) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, tuple[str, ...]]]:
        """(function, names of the classes and functions around it)."""
        yield from _functions(self.tree, ())

    def classes(self) -> Iterator[ast.ClassDef]:
        yield from (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))


def _functions(node, around):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, around
            yield from _functions(child, (*around, child.name))
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, (*around, child.name))
        else:
            yield from _functions(child, around)


@cache
def sources() -> tuple[Source, ...]:
    return tuple(Source(file) for file in sorted(PACKAGE.rglob("*.py")))


@cache
def modules() -> frozenset[str]:
    return frozenset(source.module for source in sources())


def module_of(name: str) -> str | None:
    """The module of ours that an imported name lies in, below the package; None for foreign names."""
    parts = name.split(".")
    if parts[0] != "nemotron_mamba2":
        return None
    parts = parts[1:]
    while parts and ".".join(parts) not in modules():
        parts.pop()
    return ".".join(parts)


def at_home(path: str, homes: tuple[str, ...]) -> bool:
    return any(path == home or (home != "__init__.py" and path.startswith(home)) for home in homes)


def report(findings: list[str]) -> None:
    assert not findings, "\n" + "\n".join(findings)


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


# imports ----------------------------------------------------------------------------------------------------------


def test_every_file_has_a_place_in_the_order():
    report(
        [f"{s.path}: {s.entry!r} is not in ORDER of {Path(__file__).name}" for s in sources() if s.entry not in ORDER]
    )


def test_a_file_imports_only_what_stands_above_it():
    findings = []
    for source in sources():
        for line, name in source.imports():
            target = module_of(name)
            if target is None or (target == "" and at_home(source.path, PUBLIC_NAMES_ONLY)):
                continue
            entry = target.split(".")[0] or "__init__"
            if entry != source.entry and ORDER.index(entry) > ORDER.index(source.entry):
                findings.append(f"{source.path}:{line} imports {name}, but {entry} stands below {source.entry}")
    report(findings)


def test_no_import_cycles():
    graph = {s.module: {m for _, n in s.imports() if (m := module_of(n)) not in (None, s.module)} for s in sources()}
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            pytest.fail("cycle: " + " → ".join([*trail[trail.index(module) :], module]))
        if module not in done:
            for target in sorted(graph.get(module, ())):
                # A package's __init__ runs before its parts anyway: a part that names its package is no cycle.
                if target and not module.startswith(target + "."):
                    visit(target, [*trail, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])


def test_third_party_packages_stay_in_their_folders():
    findings = []
    for source in sources():
        for line, name in source.imports():
            homes = THIRD_PARTY_HOMES.get(name.split(".")[0])
            if homes is not None and not at_home(source.path, homes):
                findings.append(f"{source.path}:{line} imports {name}, which belongs in {', '.join(homes)}")
    report(findings)


def test_server_and_adapters_see_only_public_names():
    findings = []
    for source in sources():
        if at_home(source.path, PUBLIC_NAMES_ONLY):
            for line, name in source.imports():
                if (target := module_of(name)) and target.split(".")[0] != source.entry:
                    findings.append(f"{source.path}:{line} imports {name}; import it from nemotron_mamba2 itself")
    report(findings)


def test_imports_inside_functions_only_where_agreed():
    findings = []
    for source in sources():
        if at_home(source.path, LOCAL_IMPORT_HOMES):
            continue
        for function, _ in source.functions():
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    name = node.names[0].name if isinstance(node, ast.Import) else (node.module or "")
                    if name.split(".")[0] not in LOCAL_IMPORTS_ANYWHERE:
                        findings.append(f"{source.path}:{node.lineno} {function.name}: {ast.unparse(node)}")
    report(sorted(set(findings)))


@pytest.mark.parametrize(
    ("what", "homes"),
    [
        (re.compile(r"\bos\.(environ|getenv|putenv)\b"), ENVIRONMENT_HOMES),
        (re.compile(r"\b(CUDAGraph|cuda\.graph|graph_pool_handle|make_graphed_callables)\b"), CUDA_GRAPH_HOMES),
    ],
    ids=["environment", "cuda-graphs"],
)
def test_attributes_stay_in_their_files(what, homes):
    findings = []
    for source in sources():
        if not at_home(source.path, homes):
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Attribute) and what.search(ast.unparse(node)):
                    findings.append(f"{source.path}:{node.lineno} {ast.unparse(node)} belongs in {', '.join(homes)}")
            findings += [
                f"{source.path}:{line} {name} belongs in {', '.join(homes)}"
                for line, name in source.imports()
                if what.search(name)
            ]
    report(findings)


def test_no_mutable_module_state():
    findings = []
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Global):
                findings.append(f"{source.path}:{node.lineno} global {', '.join(node.names)}")
    report(findings)


# size, names, docstrings ------------------------------------------------------------------------------------------


def test_files_stay_short():
    findings = []
    for source in sources():
        limit = KERNEL_FILE_LINES if source.path.startswith("ops/gpu/") else FILE_LINES
        if (lines := len(source.text.splitlines())) > limit:
            findings.append(f"{source.path}: {lines} lines, at most {limit}")
    report(findings)


def test_functions_stay_short():
    findings = []
    for source in sources():
        for function, _ in source.functions():
            limit = KERNEL_LINES if is_kernel(function) else FUNCTION_LINES
            if (lines := code_lines(function)) > limit:
                findings.append(f"{source.path}:{function.lineno} {function.name}: {lines} lines, at most {limit}")
    report(findings)


def code_lines(function) -> int:
    """Lines from `def` to the end, without the docstring."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    return function.end_lineno - function.lineno + 1 - (first.end_lineno - first.lineno + 1 if has_docstring else 0)


def test_arguments_past_the_third_are_keywords():
    findings = []
    for source in sources():
        for function, around in source.functions():
            if function.name.startswith("_") or at_home(source.path, ("cli/", *OPERANDS)):
                continue
            positional = [
                a.arg for a in (*function.args.posonlyargs, *function.args.args) if a.arg not in ("self", "cls")
            ]
            if len(positional) > POSITIONAL_ARGUMENTS:
                name = ".".join((*around, function.name))
                findings.append(f"{source.path}:{function.lineno} {name}: {len(positional)} positional arguments")
    report(findings)


def test_names_say_what_things_are():
    findings = []
    for source in sources():
        for node in source.classes():
            if FORBIDDEN_CLASSES.search(node.name):
                findings.append(f"{source.path}:{node.lineno} class {node.name}: name what it owns")
        for function, _ in source.functions():
            arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
            for argument in arguments:
                if argument.arg in FORBIDDEN_ARGUMENTS:
                    findings.append(f"{source.path}:{argument.lineno} {function.name}: argument {argument.arg!r}")
    report(findings)


def test_everything_public_has_a_docstring():
    findings = []
    for source in sources():
        if source.text.strip() and not ast.get_docstring(source.tree):
            findings.append(f"{source.path}:1 the module")
        for node in source.classes():
            if not node.name.startswith("_") and not ast.get_docstring(node):
                findings.append(f"{source.path}:{node.lineno} class {node.name}")
        class_names = {node.name for node in source.classes()}
        for function, around in source.functions():
            private = any(name.startswith("_") for name in (*around, function.name))
            nested = any(name not in class_names for name in around)
            if not private and not nested and not ast.get_docstring(function) and not is_plain_property(function):
                findings.append(f"{source.path}:{function.lineno} {'.'.join((*around, function.name))}")
    report(findings)


def is_plain_property(function) -> bool:
    """A property of one line: its name says what it is."""
    return len(function.body) == 1 and any(ast.unparse(d) == "property" for d in function.decorator_list)


# surface ----------------------------------------------------------------------------------------------------------


def test_the_public_names_resolve():
    import nemotron_mamba2

    names = list(nemotron_mamba2.__all__)
    assert len(names) == len(set(names)), "a name is listed twice"
    missing = [name for name in names if not hasattr(nemotron_mamba2, name)]
    assert not missing, f"in __all__ but not there: {missing}"
    assert not [name for name in names if name.startswith("_") and name != "__version__"]


def test_the_package_imports_without_optional_packages():
    program = (
        "import sys\n"
        "for name in ('triton', 'transformers', 'huggingface_hub'): sys.modules[name] = None\n"
        "import nemotron_mamba2\n"
        "for name in nemotron_mamba2.__all__: getattr(nemotron_mamba2, name)\n"
        "import nemotron_mamba2.cli\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_file_tree_of_the_readme_is_true():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme[readme.index("src/nemotron_mamba2/") :].split("```")[0]
    entries = {p.name + ("/" if p.is_dir() else "") for p in PACKAGE.iterdir() if p.name != "__pycache__"}
    report([f"README.md does not name {entry}" for entry in sorted(entries) if entry not in tree])
    named = re.findall(r"^  (\w+(?:\.py|/))", tree, re.MULTILINE)
    report([f"README.md names {entry}, which is not there" for entry in named if entry not in entries])
