"""
The table of docs/reference/diffusers-scripts.md: `python -m tests.diffusers_scripts EXAMPLES`, the folder `examples` of a
checkout of diffusers. The table is derived from the scripts' texts; `run` marks scripts that the tests train.
"""

import re
import subprocess
import sys
from pathlib import Path

from diffusers_lrlab.diffusers_plugin.hook_table import recognisers
from diffusers_lrlab.diffusers_plugin.host.source import HostScript, NotRecognised, find_faults

from .cases import CASES

_LEFT_OUT = ("research_projects", "community")
# Without the launcher's own --lr_scheduler: these scripts take all names by theirs.
RECOGNISERS = {option: recognise for option, recognise in recognisers().items() if option != "--lr_scheduler"}


def scripts_of(examples: Path) -> list[Path]:
    """The training scripts that use PyTorch, without research projects and the community's."""
    found = [*examples.rglob("train_*.py"), *examples.rglob("textual_inversion*.py")]
    return sorted(
        path for path in found if "flax" not in path.name and not {*_LEFT_OUT} & {*path.relative_to(examples).parts}
    )


def table(examples: Path) -> list[str]:
    """Commit and trained scripts, a row for each script, the number of scripts for each option, and reasons for refusals."""
    scripts = [HostScript(str(path)) for path in scripts_of(examples)]
    run = {case.script for case in CASES.values()}  # with all options
    reasons: dict[str, str] = {}
    counts = dict.fromkeys(RECOGNISERS, 0)
    rows = []
    for script in scripts:
        name = str(Path(script.path).relative_to(examples.resolve()))
        cells = [f"`{name}`"]
        for option, recognise in RECOGNISERS.items():
            try:
                recognise(script)
            except NotRecognised as reason:
                text = re.sub(r" \(lines? [\d, ]+\)", "", str(reason))  # line numbers differ between scripts
                cells.append(reasons.setdefault(text, chr(ord("a") + len(reasons))))
            else:
                counts[option] += 1
                cells.append("run" if name in run else "yes")
        rows.append(f"| {' | '.join(cells)} | {', '.join(sorted({name for name, _ in find_faults(script)}))} |")
    log = ["git", "-C", examples, "log", "-1", "--abbrev=7", "--format=%h of %cs"]
    commit = subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()
    head = ["script", *(f"`{option}`" for option in RECOGNISERS), "its own faults"]
    return [
        f"Commit {commit}, where {len(run)} scripts are trained: {', '.join(sorted(Path(name).name for name in run))}.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *rows,
        "",
        f"Of {len(scripts)} scripts: " + ", ".join(f"`{option}` {count}" for option, count in counts.items()) + ".",
        "",
        *(f"- {letter}: {reason}" for reason, letter in reasons.items()),
    ]


if __name__ == "__main__":
    print(*table(Path(sys.argv[1]).resolve()), sep="\n")
