"""Hooks of the documentation site: pages and files from outside docs/, folders in the navigation, docstrings.

mkdocs calls the functions whose names begin with ``on_``. Links that work on GitHub work on the site as well: the files
of ``OUTSIDE`` become pages of the site, and other files that a page links to are copied into its folder ``source``.
"""

import posixpath
import re
import textwrap
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_EXAMPLES = sorted(ROOT.glob("examples/**/README.md"))
# The README is the front page on GitHub; the site has docs/index.md.
OUTSIDE = {path.name: path.name.lower() for path in sorted(ROOT.glob("*.md")) if path.name != "README.md"} | {
    str(path.relative_to(ROOT)): f"{path.parent.relative_to(ROOT)}.md" for path in _EXAMPLES
}
# What the search multiplies the rank of a page by: answers come before generated tables.
BOOST = {"troubleshooting.md": 4, "hangs.md": 2, "faq.md": 2, "status.md": 0.2}
# The words of docs/ and the README, at most; docstrings, the changelog, CONTRIBUTING and the examples do not count.
BUDGET = 45_000
ORIGINS = {page: source for source, page in OUTSIDE.items()}
# Code comes first, so that nothing in it is taken for a link.
LINK = re.compile(
    r"^ *(?P<fence>```+)[^`].*?^ *(?P=fence)$|`[^`\n]+`"
    r"|(?P<text>!?\[[^\]]*\])\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)",
    re.DOTALL | re.MULTILINE,
)
# A cell of a table, the text of a piece of code, and where a long name may break.
CELL, CODE = re.compile(r"<td.*?</td>", re.DOTALL), re.compile(r"(?<=<code>)[^<]+")
SEAM = re.compile(r"(?<=[^\W_])[._/=]+(?=[^\W_])")


def words(*only: Path) -> int:
    """The words of the documentation, or of these pages of it only, without comments and the code in them."""
    pages = only or [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sum(len(re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL).split()) for page in pages)


def on_config(config: MkDocsConfig) -> None:
    """Fail if the pages have grown above the budget."""
    if (found := words()) > BUDGET:
        raise PluginError(f"docs/ and README.md have {found:,} words; expected at most {BUDGET:,}. Shorten a page.")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/ and the files that pages link to, and complete the navigation."""
    for page, source in ORIGINS.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for file in files.documentation_pages():
        for link in LINK.finditer(file.content_string):
            path = _path_in_repository(file.src_uri, link["target"] or "docs/")
            if _is_source(path) and files.get_file_from_path(f"source/{path}") is None:
                files.append(File.generated(config, f"source/{path}", abs_src_path=str(ROOT / path)))
    listed: set[str] = set()
    _collect(config.nav, listed)
    others = sorted({file.src_uri for file in files.documentation_pages()} - listed)
    config.nav = _complete(config.nav or [], others)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave docs/ or come from outside it, and escaped bars in the code of tables, as on GitHub."""
    uri = page.file.src_uri
    if uri in BOOST:
        page.meta["search"] = {"boost": BOOST[uri]}

    def rewritten(link: re.Match[str]) -> str:
        if link["target"] is None:
            in_table = markdown[markdown.rfind("\n", 0, link.start()) + 1 :].startswith("|")
            return link[0].replace(r"\|", "|") if in_table else link[0]
        path = _path_in_repository(uri, link["target"])
        if (ROOT / path).is_dir():
            return link["text"].strip("[]")
        target = OUTSIDE.get(path) or (f"source/{path}" if _is_source(path) else path.removeprefix("docs/"))
        relative = posixpath.relpath(target, posixpath.dirname(uri) or ".")
        return f"{link['text']}({relative}{link['anchor'] or ''})"

    return LINK.sub(rewritten, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the names in tables break at their dots, slashes and underscores, before they break anywhere."""
    return CELL.sub(lambda cell: CODE.sub(lambda code: SEAM.sub(r"\g<0><wbr>", code[0]), cell[0]), html)


def _path_in_repository(uri: str, target: str) -> str:
    """The file that a link of a page leads to, relative to the repository's root."""
    origin = ORIGINS.get(uri, f"docs/{uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def _is_source(path: str) -> bool:
    return not path.startswith("docs/") and not path.endswith(".md") and (ROOT / path).is_file()


def _collect(nav: Any, listed: set[str]) -> None:
    for item in nav if isinstance(nav, list) else [nav]:
        if isinstance(item, dict):
            for value in item.values():
                _collect(value, listed)
        else:
            listed.add(item)


def _complete(nav: list[Any], others: list[str]) -> list[Any]:
    """Put the pages that are not listed where their folder is. A section without pages is left out."""
    completed: list[Any] = []
    for item in nav:
        if isinstance(item, dict):
            ((title, value),) = item.items()
            inside = _complete(value, others) if isinstance(value, list) else value
            completed += [{title: inside}] if inside else []
        elif item.endswith("/"):
            completed += [page for page in others if posixpath.dirname(page) == item.strip("/")]
        else:
            completed.append(item)
    return completed


class Docstrings(griffe.Extension):
    """Turns what docstrings have of reStructuredText into Markdown: roles, and blocks after ``::``."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = _as_markdown(obj.docstring.value)


def _as_markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?([\w.]+)`", _reference, text)
    return re.sub(r"::\n\n((?: {4}.*\n?|\n)+)", _fenced, text)


def _fenced(block: re.Match[str]) -> str:
    return f":\n\n```python\n{textwrap.dedent(block[1]).rstrip()}\n```\n\n"


def _reference(role: re.Match[str]) -> str:
    """A link if the reference has the name, or else the name alone."""
    name = role[1].replace("megatron_fsdp.", "megatron.fsdp.")
    target = name if "." in name else f"megatron.fsdp.{name}"
    return f'<autoref optional identifier="{target}"><code>{role[1].split(".")[-1]}</code></autoref>'
