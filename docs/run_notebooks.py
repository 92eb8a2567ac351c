"""Runs the notebooks, each in a fresh kernel.

    python docs/run_notebooks.py             says which of them fail
    python docs/run_notebooks.py --write     keeps their outputs, for the site, and a picture of each for their page

Outputs are without times, counts and versions, so that a file changes only where its content does.
"""

import argparse
import base64
import os
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = Path(__file__).parent / "notebooks"
TIMEOUT = 600  # seconds, of a cell
SHOWN = {"playground": 1}  # which picture stands for a notebook, if not its first


def run(path: Path, write: bool) -> bool:
    """Whether a notebook ran to its end."""
    notebook, started = nbformat.read(path, as_version=4), time.monotonic()
    try:
        NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": str(path.parent)}}).execute()
    except CellExecutionError as error:
        print(f"{path.name} failed:\n{error}")
        return False
    print(f"{path.name}: {time.monotonic() - started:.0f} s")
    if write:
        nbformat.write(_plain(notebook), path)
        path.with_suffix(".png").write_bytes(picture(notebook, path.stem))
    return True


def picture(notebook: dict[str, Any], name: str) -> bytes:
    """The picture that stands for a notebook on the page of all."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return base64.b64decode("".join(pictures[SHOWN.get(name, 0)]))


def _plain(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            # Progress and logs are of one run.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                output.pop("metadata", None) if output.output_type == "stream" else output.update(metadata={})
                if "execution_count" in output:
                    output.execution_count = None
    return notebook


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of notebooks; all of them if not given")
    parser.add_argument("--write", action="store_true", help="keep the outputs")
    options = parser.parse_args()
    # The kernel is this Python, and nothing is asked of the network.
    os.environ.update(HF_HUB_OFFLINE="1", MPLBACKEND="module://matplotlib_inline.backend_inline")
    paths = [NOTEBOOKS / f"{name}.ipynb" for name in options.names] or sorted(NOTEBOOKS.glob("*.ipynb"))
    failed = [path for path in paths if not run(path, options.write)]
    sys.exit(bool(failed))
