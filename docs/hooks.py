"""Hooks of mkdocs: what is generated, notebooks as pages, and links that lead out of docs/.

Pages link to files of the repository and to notebooks by their real paths, which work wherever the repository is looked
at. The site has copies of those files under `repository/`.
"""

import base64
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import formulas
import generated

import diffusers_lrlab

ROOT = Path(__file__).parents[1]
AS_THEY_ARE = {".md", ".png", ".json", ".yaml", ".parquet"}
# What the search shows first, since a question rarely has the words of a heading.
FOUND_FIRST = ("which-tool.md", "concepts/studies.md", "tutorials/first-study.md", "tutorials/paper-figure.md")
_LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Formulas, the version in the footer, and the repository in the header once `pyproject.toml` has its address."""
    config.markdown_extensions.append(formulas.Formulas())
    config.copyright = f"{config.site_name} {diffusers_lrlab.__version__}, Apache License 2.0"
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    if address := re.search(r'^Repository = "(.+)"$', metadata, re.MULTILINE):
        config.repo_url, config.repo_name = address[1], "/".join(address[1].rstrip("/").split("/")[-2:])
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds cards and other files that pages link to, and a page for each notebook."""
    linked = {path.relative_to(ROOT).as_posix() for path in (ROOT / "model_cards").rglob("*") if path.is_file()}
    pages = generated.pages()[1:]
    while pages:  # those that are linked link to others
        found = {path for page in pages for path in _outside(page) if (ROOT / path).is_file()} - linked
        linked |= found
        pages = [ROOT / path for path in found if path.endswith(".md")]
    for path in sorted(linked):
        if Path(path).suffix in AS_THEY_ARE:
            files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
        else:
            language = "python" if path.endswith(".py") else "text"
            text = f"# {path}\n\n````{language}\n{(ROOT / path).read_text(encoding='utf-8')}````\n"
            files.append(File.generated(config, f"repository/{path}.md", content=text))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(notebook)
        page, pictures = notebook_page(json.loads(Path(str(notebook.abs_src_path)).read_text(encoding="utf-8")))
        name = notebook.src_uri.removesuffix(".ipynb")
        files.append(File.generated(config, f"{name}.md", content=page.replace("PICTURES/", f"{Path(name).name}-")))
        for number, picture in enumerate(pictures):
            files.append(File.generated(config, f"{name}-{number}.png", content=picture))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """What is generated, and links to where the site has their targets."""
    src_uri = page.file.src_uri
    if src_uri.startswith("repository/"):
        page.meta["search"] = {"exclude": True}  # cards would drown the pages
        source = src_uri.removeprefix("repository/")
        return (
            _LINK.sub(lambda match: _in_the_site(match, source, src_uri), markdown)
            if (ROOT / source).is_file()
            else markdown
        )
    if src_uri in FOUND_FIRST:
        page.meta["search"] = {"boost": 2}
    markdown = _breakable(formulas.beside_descriptions(generated.fill(markdown)))
    for name, make in generated.BUILT.items():
        if f"<!-- {name}:" in markdown:
            markdown = re.sub(rf"<!-- {name}: .*? -->", lambda _, make=make: make(), markdown)
    return _LINK.sub(lambda match: _in_the_site(match, f"docs/{src_uri}", src_uri), markdown)


def _breakable(markdown: str) -> str:
    """Dotted names in the last column of tables may break after a dot or an underscore: elsewhere they would anywhere."""
    last = re.compile(r"(?<=\| )[^|`\]]*\w+\.\w+_[^|`\]]* \|$", re.MULTILINE)
    return last.sub(lambda cell: re.sub(r"(?<=[a-z])([._])(?=[a-zA-Z])", r"\1<wbr>", cell[0]), markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """
    Lines of code by a class, since docstrings count theirs from 0 again, and flags as things that do not break.

    Docstrings have Hugging Face's form: other objects in brackets, types in backticks.
    """
    html = re.sub(r'<span id="__span-[\d-]+">', '<span class="line">', html)
    html = re.sub(
        r"<code>.*?</code>",
        lambda code: re.sub(r"(?<=[\s>])--[a-z][\w-]*", r'<span class="flag">\g<0></span>', code[0]),
        html,
        flags=re.DOTALL,
    )
    if page.file.src_uri != "reference/python.md":
        return html
    anchors = dict(re.findall(r'id="(diffusers_lrlab\.[\w.]+\.(\w+))"', html))
    anchors = {name: anchor for anchor, name in anchors.items()}

    def link(match: re.Match[str]) -> str:
        code = f"<code>{match[1]}</code>"
        return f'<a href="#{anchors[match[1]]}">{code}</a>' if match[1] in anchors else code

    html = re.sub(r"<code>(`[^<]*)</code>", lambda match: f"<code>{re.sub('[`*]', '', match[1])}</code>", html)
    return re.sub(r"\[<code>([\w.]+)</code>\]", link, html)


def on_post_page(html: str, page: Any, config: Any) -> str:
    """
    Names for the mark and the search, of which the theme has none, and the version beside the name in the header.
    """
    html = html.replace('alt="logo"', f'alt="{config.site_name}"')
    html = html.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )
    version = f'<small class="version">{diffusers_lrlab.__version__}</small>'
    return re.sub(
        r'(class="md-header__topic">\s*<span class="md-ellipsis">\s*[^<]*?)\s*(</span>)', rf"\1 {version}\2", html, count=1
    )


def _outside(page: Path) -> set[str]:
    """What a page links to outside docs/, from the root of the repository."""
    folder = page.parent.relative_to(ROOT).as_posix()
    targets = (match[3].partition("#")[0] for match in _LINK.finditer(page.read_text(encoding="utf-8")))
    paths = {posixpath.normpath(f"{folder}/{target}") for target in targets if target and "://" not in target}
    return {path for path in paths if not path.startswith("docs/")}


def _in_the_site(match: re.Match[str], source: str, src_uri: str) -> str:
    """A link of the file `source` of the repository, as the page `src_uri` of the site has it."""
    mark, text, target = match[1], match[2], match[3]
    path, hash_, anchor = target.partition("#")
    if not path or "://" in path:
        return match[0]
    full = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if (ROOT / full).is_dir():
        return text  # the site has files only
    if not (ROOT / full).is_file():
        return match[0]  # mkdocs reports it
    if full.startswith("docs/"):
        name = re.sub(r"\.ipynb$", ".md", full.removeprefix("docs/"))
    else:
        name = f"repository/{full}" if Path(full).suffix in AS_THEY_ARE else f"repository/{full}.md"
    return f"{mark}[{text}]({posixpath.relpath(name, posixpath.dirname(src_uri) or '.')}{hash_}{anchor})"


def notebook_page(notebook: dict[str, Any]) -> tuple[str, list[bytes]]:
    """A notebook as a page, and the pictures of its outputs, which the page calls PICTURES/N.png."""
    parts: list[str] = []
    pictures: list[bytes] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![Output of the cell above](PICTURES/{len(pictures)}.png)")
                pictures.append(base64.b64decode("".join(data["image/png"])))
            else:
                shown = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{shown.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures
