"""A test of a script's LR schedule for diffusers, with the inputs of its existing tests, by epochs, in two processes."""

import ast
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import PurePosixPath

from ..core.errors import LabError
from .checkout import parse_python
from .render_tests import LICENSE

HELPERS = "examples/test_examples_utils.py"
_HELPER = '''
    def check_linear_lr_schedule(self, test_args, output_dir, num_processes=2):
        """
        Runs a script with a `linear` schedule of learning rate 1e-3 and a checkpoint at each update, and checks that the
        learning rate warms up for 2 updates and is 0 after the last one.
        """
        launch_args = f"torchrun --standalone --nproc_per_node={num_processes}".split()
        run_command(["env", "ACCELERATE_USE_CPU=true"] + launch_args + test_args)

        num_updates = len([name for name in os.listdir(output_dir) if name.startswith("checkpoint-")])
        learning_rates, expected = [], []
        for update in range(1, num_updates + 1):
            state = torch.load(os.path.join(output_dir, f"checkpoint-{update}", "scheduler.bin"), weights_only=True)
            learning_rates.append(state["_last_lr"][0])
            expected.append(1e-3 * min(update / 2, (num_updates - update) / (num_updates - 2)))
        assert learning_rates == pytest.approx(expected)
'''
_IMPORTS = ("pytest", "torch")  # of the helper
_TEST_FILE = (
    LICENSE
    + """
import sys
import tempfile


sys.path.append("..")
from test_examples_utils import ExamplesTestsAccelerate  # noqa: E402


class Test{name}(ExamplesTestsAccelerate):
"""
)
_KANDINSKY = """
    --pretrained_prior_model_name_or_path hf-internal-testing/tiny-random-kandinsky-v22-prior
    --pretrained_decoder_model_name_or_path hf-internal-testing/tiny-random-kandinsky-v22-decoder
    --dataset_name hf-internal-testing/dummy_image_text_data
    --resolution 64
"""
# Inputs for scripts without a test in diffusers, from other tests of it.
_UNTESTED = {
    "train_instruct_pix2pix_sdxl": """
        --pretrained_model_name_or_path hf-internal-testing/tiny-stable-diffusion-xl-pipe
        --dataset_name hf-internal-testing/instructpix2pix-10-samples
        --resolution 64
        --seed 0
    """,
    "train_text_to_image_decoder": _KANDINSKY,
    "train_text_to_image_prior": _KANDINSKY,
}
# A test in two processes hangs, with or without the patch.
_NOT_TESTED = {"textual_inversion"}
# They cannot train in two processes: DDP finds parameters without a gradient.
_OF_ONE_PROCESS = {"train_text_to_image_prior"}
# Options that the new test sets itself, or that would hide its learning rate or its checkpoints.
_SET = {
    *("train_batch_size", "gradient_accumulation_steps", "max_train_steps", "num_train_epochs", "num_epochs"),
    *("learning_rate", "scale_lr", "lr_scheduler", "lr_warmup_steps", "lr_num_cycles", "lr_power"),
    *("checkpointing_steps", "checkpoints_total_limit", "output_dir", "repeats"),
}


@dataclass(frozen=True)
class _Command:
    """The command line of a script in a test of diffusers."""

    path: str  # of the test file
    class_end: int  # the last line of its class
    lines: list[str]  # the script, then its options
    more: str  # statements that add options
    variable: str = "test_args"


def with_test(
    script: str, text: str, read: Callable[[str], str | None], files: Collection[str]
) -> tuple[str | None, dict[str, str]]:
    """The file of a new test of a script, and the new text of the files that change; none if no test could run."""
    stem = PurePosixPath(script).stem
    name = stem.removeprefix("train_")
    if stem in _NOT_TESTED:
        return None, {}
    command = next(_commands(script, read, files), None)
    if command is not None:
        lines = (read(command.path) or "").splitlines(keepends=True)
        lines.insert(command.class_end, "\n" + _test(name, text, command))
        return command.path, {command.path: "".join(lines), **_with_helper(read)}
    path = str(PurePosixPath(script).with_name(f"test_{name}.py"))
    if stem not in _UNTESTED or path in files:
        return None, {}
    options = [line.strip() for line in _UNTESTED[stem].strip().splitlines()]
    head = _TEST_FILE.format(year=date.today().year, name="".join(part.capitalize() for part in name.split("_")))
    return path, {path: head + _test(name, text, _Command(path, 0, [script, *options], "")), **_with_helper(read)}


def _commands(script: str, read: Callable[[str], str | None], files: Collection[str]) -> Iterator[_Command]:
    """The commands that run a script in the tests of its folder."""
    folder = PurePosixPath(script).parent
    for path in sorted(files):
        if PurePosixPath(path).parent != folder or not PurePosixPath(path).name.startswith("test_"):
            continue
        text = read(path) or ""
        tree = parse_python(path, text)
        for test_class in (n for n in tree.body if isinstance(n, ast.ClassDef)):
            own_script = any(
                isinstance(n, ast.Assign) and ast.unparse(n) == f"script_path = {script!r}" for n in test_class.body
            )
            named = ("{self.script_path}", script) if own_script else (script,)
            for block in (n.body for n in ast.walk(test_class) if isinstance(n, ast.With)):
                yield from _in_block(path, text, test_class, block, named)


def _in_block(
    path: str, text: str, test_class: ast.ClassDef, block: list[ast.stmt], named: tuple[str, ...]
) -> Iterator[_Command]:
    for position, statement in enumerate(block):
        joined = next((n for n in ast.walk(statement) if isinstance(n, ast.JoinedStr)), None)
        if not isinstance(statement, ast.Assign) or joined is None:
            continue
        values = [ast.unparse(n.value) for n in joined.values if isinstance(n, ast.FormattedValue)]
        source = ast.get_source_segment(text, joined) or ""
        lines = [line.strip() for line in source.strip('f"').splitlines() if line.strip()]
        # Names that are local to that test cannot be used in another one.
        if not lines or lines[0] not in named or not all(n == "tmpdir" or n.startswith("self.") for n in values):
            continue
        variable, more = ast.unparse(statement.targets[0]), []
        for later in block[position + 1 :]:
            if not ast.unparse(later).startswith(f"{variable}.extend("):
                break
            more.append(ast.get_source_segment(text, later) or "")
        yield _Command(path, test_class.end_lineno or 0, lines, "\n".join(more), variable)


def _test(name: str, text: str, command: _Command) -> str:
    script, *options = command.lines
    between = "=" if any("=" in option for option in options) else " "
    epochs = "num_train_epochs" if '"--num_train_epochs"' in text else "num_epochs"
    kept = [option for option in options if option.replace("=", " ").split()[0].lstrip("-") not in _SET]
    given: dict[str, int | str] = {"train_batch_size": 1, "gradient_accumulation_steps": 4, epochs: 4}
    if '"--repeats"' in text:
        given["repeats"] = 4  # of the few images, so that processes and accumulation do not divide them evenly
    given |= {"learning_rate": "1e-3", "lr_scheduler": "linear", "lr_warmup_steps": 2}
    given |= {"checkpointing_steps": 1, "output_dir": "{tmpdir}"}
    if _keeps_few_checkpoints(text):
        given["checkpoints_total_limit"] = 100
    lines = [script, *kept, *(f"--{option}{between}{value}" for option, value in given.items())]
    body = f'{command.variable} = f"""\n' + textwrap.indent("\n".join(lines), "    ") + '\n    """.split()\n'
    body += f"{command.more}\n" if command.more else ""
    processes = ", num_processes=1" if f"train_{name}" in _OF_ONE_PROCESS else ""
    body += f"\nself.check_linear_lr_schedule({command.variable}, tmpdir{processes})\n"
    return (
        f"    def test_{name}_lr_schedule_by_epochs(self):\n        with tempfile.TemporaryDirectory() as tmpdir:\n"
    ) + textwrap.indent(body, " " * 12, lambda line: bool(line.strip()))


def _keeps_few_checkpoints(text: str) -> bool:
    """Whether a script deletes checkpoints by default."""
    for call in (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and n.args):
        if ast.unparse(call.args[0]) == "'--checkpoints_total_limit'":
            return any(keyword.arg == "default" and ast.unparse(keyword.value) != "None" for keyword in call.keywords)
    return False


def _with_helper(read: Callable[[str], str | None]) -> dict[str, str]:
    text = read(HELPERS) or ""
    if "def check_linear_lr_schedule(" in text:
        return {}
    tree = parse_python(HELPERS, text)
    base = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ExamplesTestsAccelerate"), None)
    anchor = next((n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "accelerate.utils"), None)
    if base is None or anchor is None:
        raise LabError(
            f"{HELPERS} of this checkout has changed where the test would go. Use a commit near v0.42.1 as the base, or a "
            "newer diffusers_lrlab."
        )
    found = {alias.name for n in tree.body if isinstance(n, ast.Import) for alias in n.names}
    lines = text.splitlines(keepends=True)
    lines.insert(base.end_lineno or 0, _HELPER)
    lines.insert(anchor.lineno - 1, "".join(f"import {module}\n" for module in _IMPORTS if module not in found))
    return {HELPERS: "".join(lines)}
