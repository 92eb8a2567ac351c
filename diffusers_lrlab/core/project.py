"""What cards say of this project: the address of its repository, how it is installed, and how it is cited."""

import importlib.metadata

NAME = "diffusers_lrlab"


def repository_of(urls: list[str]) -> str | None:
    """The address in the `Project-URL` fields of a distribution, as `[project.urls]` of `pyproject.toml` has it."""
    named = dict(each.split(", ", 1) for each in urls)
    return named["Repository"].rstrip("/") if "Repository" in named else None


def _repository() -> str | None:
    try:
        return repository_of(importlib.metadata.metadata(NAME).get_all("Project-URL") or [])
    except importlib.metadata.PackageNotFoundError:  # runs from its source
        return None


REPOSITORY = _repository()
"""The address of the repository, without a slash at its end; cards link to it, and install from it, once there is one."""


def project_link() -> str:
    """The project as Markdown, with a link to its repository if that has an address."""
    return f"[{NAME}]({REPOSITORY})" if REPOSITORY else NAME


def install_command(extra: str) -> str:
    """The command that installs the package with an extra, without a checkout."""
    command = f"pip install '{NAME}[{extra}] @ git+{REPOSITORY or 'REPOSITORY'}'"
    return command if REPOSITORY else f"{command}  # REPOSITORY: the address of the project's repository"


def _citation() -> str:
    fields = {
        "title": f"{{{NAME}}}",
        "author": "{the diffusers_lrlab developers}",
        "license": "Apache-2.0",
        **({"url": REPOSITORY} if REPOSITORY else {}),
    }
    return "\n".join([f"@software{{{NAME},", *(f"  {key} = {{{value}}}," for key, value in fields.items()), "}"])


CITATION = _citation()
"""The entry of `CITATION.cff` in BibTeX."""
