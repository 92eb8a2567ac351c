"""What the README claims: its pictures, the commands behind its figures, and the one address of the repository."""

import importlib.metadata
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import printed
import pytest
import tomllib
import yaml

from diffusers_lrlab.core.environment import repository

TEXT = (printed.ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def project():
    return tomllib.loads((printed.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_its_pictures_are_there_with_a_text_and_for_dark_pages():
    pictures = re.findall(r"<picture>.*?</picture>", TEXT, re.DOTALL)
    assert len(pictures) == 1
    for picture in pictures:
        assert re.search(r'<img alt="[^"]{20,}"', picture)
        assert "(prefers-color-scheme: dark)" in picture
        for path in re.findall(r'(?:src|srcset)="([^"]+)"', picture):
            assert (printed.ROOT / path).is_file(), path


def section(target):
    """The text of a page under a heading."""
    path, _, anchor = target.partition("#")
    text = (printed.ROOT / path).read_text(encoding="utf-8")
    for match in re.finditer(r"^(#+) (.*)$", text, re.MULTILINE):
        if re.sub(r"[^\w\- ]", "", match[2].lower()).strip().replace(" ", "-") == anchor:
            end = re.search(rf"^#{{1,{len(match[1])}}} ", text[match.end() :], re.MULTILINE)
            return text[match.end() :][: end.start() if end else None]
    raise AssertionError(target)


def test_every_figure_has_its_command():
    """Each row of results leads to a card with a command, and each link to a benchmark to a section that prints one."""
    results = TEXT.partition("## Results")[2].partition("\n## ")[0]
    rows = [line for line in results.splitlines() if line.startswith("| ") and "](model_cards/" in line]
    assert len(rows) > 6
    cards = [re.search(r"\]\(model_cards/([\w-]+)/README\.md\)", row)[1] for row in rows]
    for card, row in zip(cards, rows, strict=True):
        assert "````bash\n" in (printed.ROOT / f"model_cards/{card}/README.md").read_text(encoding="utf-8"), card
        summary = json.loads((printed.ROOT / f"model_cards/{card}/summary.json").read_text(encoding="utf-8"))
        effects = [
            ", ".join(f"`{each['dataset']}` {each['text']}" for each in claim["datasets"]) for claim in summary["claims"]
        ]
        assert row.split(" | ")[1] in effects, row
    targets = set(re.findall(r"\]\((docs/benchmarks\.md#[\w-]+)\)", TEXT))
    assert len(targets) > 2
    for target in targets:
        assert "```bash\n" in section(target), target


def test_the_repository_has_one_address(project, monkeypatch):
    """That of pyproject.toml: in what installs without a clone, in the citation, and in what the package knows."""
    address = project.get("urls", {}).get("Repository")
    (command,) = set(re.findall(r'^pip install ".* @ git\+.*$', TEXT, re.MULTILINE))
    assert re.findall(r"(?:git\+|-c )(\S+?)(?=\"|/raw/)", command) == [address or "REPOSITORY"] * 2
    citation = yaml.safe_load((printed.ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation.get("repository-code") == address == repository()
    urls = ["Other, https://example.org", "Repository, https://example.org/a/b/"]
    monkeypatch.setattr(importlib.metadata, "metadata", lambda _: SimpleNamespace(get_all=lambda _: urls))
    assert repository() == "https://example.org/a/b"


@pytest.mark.slow
@pytest.mark.skipif(not (printed.ROOT / ".git").exists(), reason="no git repository, as in an unpacked sdist")
def test_it_installs_without_a_clone(tmp_path):
    """The README's line, with this repository as the address, and without what it depends on, which is here."""
    (command,) = set(re.findall(r'^pip install "(.*) @ git\+\S+" -c \S+$', TEXT, re.MULTILINE))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", f"{command} @ git+file://localhost{printed.ROOT}"),
            *("-c", (printed.ROOT / "constraints.txt").as_uri(), "--no-deps", "--no-build-isolation", "--target", tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "diffusers_lrlab/hub/model_card.md").is_file()
