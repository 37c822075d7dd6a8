"""House rules that no linter states: sizes, docstrings, what is caught, what is never called."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from miniverl_dist.config.load import load_config, load_teacher_service

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("miniverl_dist", "rollout_server", "teacher_server", "actors")
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_UNDOCUMENTED_LINES = 450, 60, 8
CATCH_EVERYTHING = {
    "miniverl_dist/generate_api/app.py": "a defect of a handler ends one request, not the server",
    "miniverl_dist/observability/tracking/follower.py": "trackers raise anything, a run goes on",
    "rollout_server/bfcl/dispatch.py": "the tools of bfcl-eval raise anything, and the model reads",
    "teacher_server/batching.py": "what a scorer raises in its thread is told to whoever asked",
}
"""The modules that may say ``except Exception``, each with its reason."""
CODE_LOADERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "imp"}
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
UNSAFE_KEYWORDS = {"allow_pickle": True, "trust_remote_code": True, "weights_only": False}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def num_lines(node: Definition) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def public_definitions(scope: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    """Functions and classes that a user of the module can reach by public names."""
    for node in scope.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_"):
            continue
        yield node
        if isinstance(node, ast.ClassDef):
            yield from public_definitions(node)


def sizes(tree: ast.Module, text: str) -> Iterator[str]:
    """Files and functions that are too long."""
    if text.count("\n") > MAX_FILE_LINES:
        yield f"{text.count(chr(10))} lines, at most {MAX_FILE_LINES}"
    functions = (node for node in ast.walk(tree) if isinstance(node, Function))
    for node in functions:
        if num_lines(node) > MAX_FUNCTION_LINES:
            yield f"{node.name} has {num_lines(node)} lines, at most {MAX_FUNCTION_LINES}"


def undocumented(tree: ast.Module, _: str) -> Iterator[str]:
    """Modules, and public functions and classes of some length, that do not say what they are."""
    if not ast.get_docstring(tree):
        yield "the module has no docstring"
    for node in public_definitions(tree):
        if num_lines(node) > MAX_UNDOCUMENTED_LINES and not ast.get_docstring(node):
            yield f"{node.name} has {num_lines(node)} lines and no docstring"


def broad_handlers(tree: ast.Module, _: str) -> Iterator[str]:
    """Handlers of ``Exception``, of anything, or of ``BaseException`` without raising it again."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        names = {n.id if isinstance(n, ast.Name) else None for n in caught}
        last = node.body[-1]
        raises_again = isinstance(last, ast.Raise) and last.exc is None
        if node.type is None or "Exception" in names:
            yield f"line {node.lineno} catches everything"
        elif "BaseException" in names and not raises_again:
            yield f"line {node.lineno} swallows BaseException"


def code_execution(tree: ast.Module, _: str) -> Iterator[str]:
    """Whatever can turn text or a file into running code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            named = [module or ""] + [alias.name for alias in node.names]
            if found := CODE_LOADERS & {name.split(".")[0] for name in named}:
                yield f"line {node.lineno} imports {', '.join(sorted(found))}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "__import__", "torch.load", "os.system", "yaml.load"):
                yield f"line {node.lineno} calls {called}"
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg == "shell" and value is not False:
                    yield f"line {node.lineno} runs a shell"
                if keyword.arg in UNSAFE_KEYWORDS and value is UNSAFE_KEYWORDS[keyword.arg]:
                    yield f"line {node.lineno} passes {keyword.arg}={value}"


Rule = Callable[[ast.Module, str], Iterator[str]]


def broken(rule: Rule) -> dict[str, list[str]]:
    """What a rule finds in the four packages, by file."""
    found = {}
    for path in sources():
        text = path.read_text()
        if problems := list(rule(ast.parse(text), text)):
            found[name_of(path)] = problems
    return found


@pytest.mark.parametrize("rule", [sizes, undocumented, code_execution], ids=lambda r: r.__name__)
def test_no_module_breaks_a_rule(rule: Rule) -> None:
    assert len(sources()) > 90
    assert broken(rule) == {}


def test_only_named_modules_catch_everything() -> None:
    """And every module on the list still needs to be there."""
    assert set(broken(broad_handlers)) == set(CATCH_EVERYTHING)


LONG = "\n".join(f"    x = {number}" for number in range(60))
METHOD = "    def f(self):\n" + LONG.replace("    ", "        ")
VIOLATIONS: list[tuple[Rule, str, int]] = [
    (sizes, "x = 1\n" * 451, 1),
    (sizes, "x = 1\n" * 450, 0),
    (sizes, f"def f():\n{LONG}\n", 1),
    (sizes, f"async def f():\n{LONG}\n", 1),
    (undocumented, "x = 1\n", 1),
    (undocumented, f'"""M."""\ndef f():\n{LONG}\n', 1),
    (undocumented, f'"""M."""\ndef _f():\n{LONG}\n', 0),
    (undocumented, f'"""M."""\nclass A:\n    """A."""\n{METHOD}\n', 1),
    (undocumented, f'"""M."""\nclass _A:\n{METHOD}\n', 0),
    (broad_handlers, "try:\n    f()\nexcept Exception:\n    pass\n", 1),
    (broad_handlers, "try:\n    f()\nexcept (ValueError, Exception):\n    raise\n", 1),
    (broad_handlers, "try:\n    f()\nexcept:\n    raise\n", 1),
    (broad_handlers, "try:\n    f()\nexcept BaseException:\n    g()\n", 1),
    (broad_handlers, "try:\n    f()\nexcept BaseException:\n    g()\n    raise\n", 0),
    (broad_handlers, "try:\n    f()\nexcept ValueError:\n    pass\n", 0),
    (code_execution, "eval('1')\n", 1),
    (code_execution, "exec('x = 1')\n", 1),
    (code_execution, "model.to(device).eval()\n", 0),
    (code_execution, "ast.literal_eval(text)\n", 0),
    (code_execution, "import pickle\n", 1),
    (code_execution, "from pickle import loads\n", 1),
    (code_execution, "import torch\ntorch.load(path)\n", 1),
    (code_execution, "np.load(path, allow_pickle=True)\n", 1),
    (code_execution, "load(folder, trust_remote_code=False)\n", 0),
    (code_execution, "load(folder, trust_remote_code=True)\n", 1),
    (code_execution, "run(text, shell=True)\n", 1),
]


@pytest.mark.parametrize(("rule", "text", "count"), VIOLATIONS)
def test_the_rules_see_a_violation(rule: Rule, text: str, count: int) -> None:
    assert len(list(rule(ast.parse(text), text))) == count


def repository_files() -> list[Path]:
    """Files under version control, and new ones that are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if result.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in result.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


# Spelled with classes so that this file does not match itself. Ada is the user of test data.
MACHINE = re.compile(
    r"(?<![\w.~/])/(?:roo[t]|wor[k]|mn[t]|workspac[e]|srv|scratch)/[\w.-]+"
    r"|(?<![\w.~/])/(?:home|User[s])/(?!ada\b|tmp/)[\w.-]+"
    r"|pypi\.or[g]|pythonhosted\.or[g]|download\.pytorch\.or[g]|artifactor[y]|codeartifac[t]"
)


def private_names() -> set[str]:
    """Where this checkout, its interpreter and its package index are; none may be written down."""
    paths = {path for path in (ROOT, Path(sys.prefix), Path.home()) if len(path.parts) > 2}
    hosts = set()
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX"):
        hosts |= {urlsplit(url).hostname for url in os.environ.get(variable, "").split()}
    return {str(path) for path in paths} | {h for h in hosts if h and h not in LOOPBACK}


def traces(text: str, names: set[str]) -> list[str]:
    """Machine paths and hosts in a text."""
    return [match[0] for match in MACHINE.finditer(text)] + [n for n in names if n in text]


def test_no_file_names_a_machine_or_a_package_index() -> None:
    files = repository_files()
    assert len(files) > 200
    names = private_names()
    found = {name_of(p): traces(p.read_text(errors="replace"), names) for p in files}
    assert {name: where for name, where in found.items() if where} == {}


@pytest.mark.parametrize(
    ("text", "is_private"),
    [
        ("see /roo" + "t/.cache/x", True),
        ("run /wor" + "k/main/demo.sh", True),
        ("/home/" + "grace/project", True),
        ("/home/ada/runs/x", False),
        ("--index-url https://pypi" + ".org/simple", True),
        ("https://download.pytorch" + ".org/whl/cpu", True),
        ("a /tmp/file in a text", False),
        ("docs/wor" + "k/x.md and ~/mnt/x", False),
    ],
)
def test_the_search_for_machines_sees_one(text: str, is_private: bool) -> None:
    assert bool(traces(text, private_names())) == is_private


def test_the_search_for_machines_knows_where_it_runs() -> None:
    assert traces("see /srv1/checkout/x", {"/srv1/checkout"}) == ["/srv1/checkout"]


SERVICES = sorted((ROOT / "configs").glob("teacher_*.yaml"))
RECIPES = sorted(set((ROOT / "configs").glob("*.yaml")) - set(SERVICES))


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 5
    assert len(SERVICES) >= 2


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_is_named_like_its_file(recipe: Path) -> None:
    assert load_config(recipe).config.name == recipe.stem


@pytest.mark.parametrize("service", SERVICES, ids=lambda path: path.stem)
def test_every_service_loads_and_is_named_like_its_file(service: Path) -> None:
    assert load_teacher_service(service).name == service.stem


def test_recipes_of_the_repository_differ_in_what_they_run() -> None:
    digests = Counter(load_config(recipe).digest for recipe in RECIPES)
    assert max(digests.values()) == 1


def test_layers_hold() -> None:
    """The contracts in pyproject.toml, checked by import-linter."""
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.exists():
        pytest.skip("import-linter is not installed")
    result = subprocess.run(
        [lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
    assert "2 kept, 0 broken" in result.stdout


def test_test_files_have_names_of_their_own() -> None:
    """Two files of one name would be one module to anyone who reads a failure."""
    files = (ROOT / "tests").rglob("*.py")
    # pytest finds a folder's fixtures by this name; overlays have the names of what they stand for.
    names = Counter(
        p.name for p in files if p.name != "conftest.py" and "cpu_overlay" not in p.parts
    )
    assert {name for name, count in names.items() if count > 1} == set()


def test_nothing_of_ours_is_mocked() -> None:
    mocked = re.compile(r"unittest[.]mock|\bMagicMock\b|\bmocker\b")
    here = Path(__file__)
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != here]
    assert [path.name for path in files if mocked.search(path.read_text())] == []
