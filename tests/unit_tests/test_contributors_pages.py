"""Names on the contributors' pages exist: functions, commands, examples, keys of the issue forms."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONTRIBUTING = ("CONTRIBUTING.md", ".github/PULL_REQUEST_TEMPLATE.md")
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml"))
# A link to a source file, and the names in code after a colon.
REFERENCE = re.compile(r"\]\((\.\./megatron/[^)]+\.py)\)(?:: ((?:`[\w.]+`(?:, )?)+))?")


def references() -> list[tuple[str, str]]:
    """The file and the name of each reference of the tour; the name is empty if it is to the whole file."""
    found = []
    for path, names in REFERENCE.findall((DOCS / "tour.md").read_text()):
        found += [(path, name) for name in re.findall(r"`([\w.]+)`", names) or [""]]
    return found


def names_in(path: Path) -> set[str]:
    """The functions, classes, methods and variables that a file defines; methods as ``Class.method``."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            methods = [inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)]
            names |= {node.name, *(f"{node.name}.{method}" for method in methods)}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
    return names


@pytest.mark.parametrize(("path", "name"), sorted(set(references())))
def test_exists(path: str, name: str) -> None:
    assert (DOCS / path).is_file()
    assert not name or name in names_in(DOCS / path)


def test_the_walk_of_a_step_names_many_functions() -> None:
    assert len({name for _, name in references() if name}) >= 25


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "examples/README.md", ".github/PULL_REQUEST_TEMPLATE.md"]
)
def test_make_has_the_commands(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^ {4})make ([a-z-]+)", (ROOT / page).read_text(), flags=re.MULTILINE))
    assert named and named <= targets


def test_every_example_is_in_the_index() -> None:
    index = (ROOT / "examples" / "README.md").read_text()
    examples = {path.parent.name for path in ROOT.glob("examples/*/README.md")}
    examples |= {f"frameworks/{path.name}" for path in ROOT.glob("examples/frameworks/*.py")}
    assert examples and [name for name in examples if name not in index] == []


@pytest.mark.parametrize("page", ["SECURITY.md", "examples/README.md", *CONTRIBUTING])
def test_links_of_other_pages_lead_to_files(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)[)#]", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml")), ids=lambda path: path.name
)
def test_issue_forms_have_the_keys_that_github_needs(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)
    modules = re.findall(r"python -m (megatron[\w.]+)", path.read_text())
    assert all(importlib.util.find_spec(module) for module in modules)
