"""Collect the Markdown of the documentation site in one folder, from which zensical builds it.

The pages of docs/ stay readable in the repository: they link to files that are not on a site. Here README becomes the
first page, the other pages of the repository stand beside those of docs/, each file that a page links to becomes a page
that shows it, pictures are copied, and each public module gets a page of API reference. docs/SUMMARY.md gives the order
of the pages and docs/names.md the public modules. zensical.toml configures the site itself.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE_DOCS = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CODE_OF_CONDUCT.md": "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
}
"""The pages that do not lie in docs/, with their places on the site."""
NAVIGATION = "SUMMARY.md"
CODE_OR_LINK = re.compile(r"^```.*?^```$|\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)|`[^`]*`", re.MULTILINE | re.DOTALL)
MODULE_HEADING = re.compile(r"^## `(penstock[\w.]*)`$", re.MULTILINE)
PICTURES = "docs/images/"
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}


def places(root: Path) -> dict[str, str]:
    """Return the place on the site of each page, by its path in the repository."""
    in_docs = [path.relative_to(root / "docs").as_posix() for path in sorted((root / "docs").rglob("*.md"))]
    return {f"docs/{path}": path for path in in_docs} | OUTSIDE_DOCS


def public_modules(names: str) -> list[str]:
    """Return the import names of the public modules, `penstock` first, in the order of the page docs/names.md."""
    return list(dict.fromkeys(["penstock", *MODULE_HEADING.findall(names)]))


def relinked(text: str, page: str, of: dict[str, str], root: Path) -> str:
    """Return the text of `page` with each link to a file led to its place on the site.

    `of` gives the places of pages; a picture is copied, and any other file is shown in source/. A site lists no folder:
    a link to one becomes its text.
    """

    def replaced(found: re.Match[str]) -> str:
        label, link, anchor = found.groups(default="")
        if not link:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        if (root / path).is_dir():
            return label
        place = path.removeprefix("docs/") if path.startswith(PICTURES) else of.get(path, f"source/{path}.md")
        return f"[{label}]({posixpath.relpath(place, posixpath.dirname(of[page]) or '.')}{anchor})"

    return CODE_OR_LINK.sub(replaced, text)


def linked_files(text: str, page: str, of: dict[str, str], root: Path) -> Iterable[str]:
    """Yield the paths in the repository of the files to which a page links, other pages and pictures excepted."""
    for _, link, _ in CODE_OR_LINK.findall(text):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        if link and path not in of and not path.startswith(PICTURES) and (root / path).is_file():
            yield path


def source_page(path: str, text: str) -> str:
    """Return a page that shows a file of the repository, and that the site's search leaves out."""
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n~~~~ {language}\n{text.rstrip()}\n~~~~\n"


def reference_page(module: str) -> str:
    """Return the page of a public module, which mkdocstrings fills with the names in its `__all__`."""
    return f"# {module}\n\n::: {module}\n"


def reference_entries(modules: Iterable[str]) -> str:
    """Return the part of the navigation that lists the pages of public modules."""
    return "- API reference\n" + "".join(f"    - [{module}](reference/{module}.md)\n" for module in modules)


def version_of(root: Path) -> str:
    """Return the version of the package: that of its documentation."""
    found = re.search(r'^__version__ = "(.+)"$', (root / "src/penstock/__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError("src/penstock/__init__.py: expected a line with __version__, got none")
    return found[1]


def collect(root: Path) -> dict[str, str]:
    """Return the text of every page of the site, by its place. The first entry of the navigation has the version."""
    of = places(root)
    texts = {page: (root / page).read_text() for page in of}
    site = {place: relinked(texts[page], page, of, root) for page, place in of.items()}
    for page, text in texts.items():
        site |= {
            f"source/{path}.md": source_page(path, (root / path).read_text())
            for path in linked_files(text, page, of, root)
        }
    modules = public_modules(texts["docs/names.md"])
    site |= {f"reference/{module}.md": reference_page(module) for module in modules}
    navigation = site[NAVIGATION].replace("- [penstock](", f"- [penstock {version_of(root)}](", 1)
    site[NAVIGATION] = navigation + reference_entries(modules)
    return site


def main(out: Path) -> None:
    """Write the pages of this repository's site into the folder `out`, which is emptied before."""
    shutil.rmtree(out, ignore_errors=True)
    for place, text in collect(ROOT).items():
        path = out / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copytree(ROOT / PICTURES, out / "images")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
