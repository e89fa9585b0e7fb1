"""What MkDocs does beside turning pages of docs/ into HTML.

- Pages of the repository that are not in docs/, such as benchmarks/README.md, are pages here.
- A link from a page to any other file of the repository leads to a page with that file.
- `<!-- generated: NAME -->` in a page is replaced by what `reference.py` reads from the code.
- A picture of docs/pictures is put into the page, so that it has the colours of the page.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reference
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = {
    "benchmarks.md": "benchmarks/README.md",
    "guides/movielens.md": "examples/movielens/README.md",
    "developers/changelog.md": "CHANGELOG.md",
    "developers/contributing.md": "CONTRIBUTING.md",
    "developers/report_vulnerability.md": "SECURITY.md",
    "developers/test_cluster.md": "cluster/README.md",
}
"""Pages of the site that are files of the repository outside docs/."""
_URI_OF = {source: uri for uri, source in PAGES.items()}
_SOURCES = "files"
"""The folder of pages that show a file of the repository."""
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCED = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_PICTURE = re.compile(r"^!\[([^\]]*)\]\((?:\.\./)*pictures/(\w+)\.svg\)$", re.MULTILINE)
_LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}


def on_files(files: Any, config: Any) -> Any:
    """Add pages of the repository, the files that pages link to, and their pictures."""
    for uri, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=text))
    waiting = {
        _get_repository_path(f.src_uri): f.content_string
        for f in files
        if f.is_documentation_page()
    }
    shown: set[str] = set()
    while waiting:
        page, text = waiting.popitem()
        for target in _find_links(page, text):
            uri = _find_uri(target)
            if uri is None or uri in shown or files.get_file_from_path(uri):
                continue
            shown.add(uri)
            if uri.endswith(".md"):
                content = _render_source(target)
                files.append(File.generated(config, uri, content=content))
                if (ROOT / target).is_dir():
                    waiting[f"{target}/."] = content
            else:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in what is generated, and turn links within the repository into links of the site."""
    source = _get_repository_path(page.file.src_uri)
    markdown = _MARKER.sub(lambda found: reference.GENERATORS[found[1]](), markdown)
    markdown = _PICTURE.sub(_inline_picture, markdown)

    def relink(found: re.Match[str]) -> str:
        target = _resolve(source, found[1])
        uri = _find_uri(target) if target else None
        if uri is None:
            return found[0]
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".") + (
            found[2] or ""
        )

    return _outside_code(markdown, lambda text: _LINK.sub(relink, text))


def _get_repository_path(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    if uri.startswith(f"{_SOURCES}/"):
        path = uri.removeprefix(f"{_SOURCES}/").removesuffix(".md")
        return f"{path}/." if (ROOT / path).is_dir() else path
    return PAGES.get(uri, f"docs/{uri}")


def _resolve(page: str, link: str) -> str | None:
    """Return the path in the repository to which a link of a page leads, if it does."""
    if ":" in link or link.startswith("/"):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return target if (ROOT / target).exists() else None


def _find_links(page: str, text: str) -> Iterator[str]:
    plain = _FENCED.sub("", text)
    for found in _LINK.finditer(plain):
        if target := _resolve(page, found[1]):
            yield target


def _find_uri(target: str) -> str | None:
    """Return where on the site a file of the repository is."""
    if target in _URI_OF:
        return _URI_OF[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if Path(target).suffix in (".png", ".svg"):
        return f"{_SOURCES}/{target}"
    return f"{_SOURCES}/{target}.md"


def _render_source(target: str) -> str:
    """Return a page that shows a file, or lists a folder. It is left out of the search."""
    path = ROOT / target
    head = f"---\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n\n# `{target}`\n\n"
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if each.suffix in _LANGUAGES)
        return head + "".join(f"- [`{name}`]({name})\n" for name in names)
    language = _LANGUAGES.get(path.suffix, "text")
    return f"{head}````{language}\n{path.read_text(encoding='utf-8')}\n````\n"


def _inline_picture(found: re.Match[str]) -> str:
    svg = (ROOT / "docs" / "pictures" / f"{found[2]}.svg").read_text(encoding="utf-8")
    if 'class="drawing"' not in svg:  # the recording of a terminal has colours of its own
        return found[0]
    svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)  # site.css has the colours
    return f'<figure class="concept">{"".join(line.strip() for line in svg.splitlines())}</figure>'


def _outside_code(markdown: str, change: Any) -> str:
    """Change what is not in a fenced block."""
    parts, end = [], 0
    for block in _FENCED.finditer(markdown):
        parts += [change(markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(markdown[end:])])
