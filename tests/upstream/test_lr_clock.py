"""The length of the schedule, mended: in small scripts, one for each form, and in a repository of diffusers' shape."""

import difflib
import itertools
import math
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from tables import cases

from diffusers_lrlab import LabError
from diffusers_lrlab.cli.__main__ import main as lrlab
from diffusers_lrlab.upstream.lr_clock import DONOR, patched
from diffusers_lrlab.upstream.lr_clock_patches import lr_clock_patches, table
from diffusers_lrlab.upstream.lr_clock_tests import HELPERS
from diffusers_lrlab.upstream.schedule_source import AlreadyRight, NotPatched

SCRIPT = """\
import math


logger = get_logger(__name__)


def main(args):
    accelerator = Accelerator({accelerator})
    train_dataloader = DataLoader()

    # Scheduler and math around the number of training steps.
{before}
    lr_scheduler = get_scheduler(
        args.lr_scheduler,
        optimizer=optimizer,
        num_warmup_steps={warmup},
        num_training_steps={length},
        power=args.lr_power,
    )

    # Prepare everything.
    model, optimizer_2, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )

    # The loader may have another length now.
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
{again}
    # The epochs, too.
    args.num_train_epochs = math.ceil(args.max_train_steps / num_update_steps_per_epoch)
    return args.max_train_steps
"""
OLD = {
    "before": """\
    overrode_max_train_steps = False
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
        overrode_max_train_steps = True
""",
    "again": """\
    if overrode_max_train_steps:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch""",
    "accelerator": "",
}
NEW = {
    "before": """\
    # As the pull request says.
    num_warmup_steps_for_scheduler = args.lr_warmup_steps * accelerator.num_processes
    if args.max_train_steps is None:
        len_train_dataloader_after_sharding = math.ceil(len(train_dataloader) / accelerator.num_processes)
        num_update_steps_per_epoch = math.ceil(len_train_dataloader_after_sharding / args.gradient_accumulation_steps)
        num_training_steps_for_scheduler = (
            args.num_train_epochs * num_update_steps_per_epoch * accelerator.num_processes
        )
    else:
        num_training_steps_for_scheduler = args.max_train_steps * accelerator.num_processes
""",
    "again": """\
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
        if num_training_steps_for_scheduler != args.max_train_steps * accelerator.num_processes:
            logger.warning("The lengths differ.")""",
    "accelerator": "",
    "warmup": "num_warmup_steps_for_scheduler",
    "length": "num_training_steps_for_scheduler",
}
DONOR_TEXT = SCRIPT.format(**NEW)
N_TIMES = {
    "warmup": "args.lr_warmup_steps * accelerator.num_processes",
    "length": "args.max_train_steps * accelerator.num_processes",
}
G_TIMES = {
    name: value.replace("accelerator.num_processes", "args.gradient_accumulation_steps") for name, value in N_TIMES.items()
}
PLAIN = {"warmup": "args.lr_warmup_steps", "length": "args.max_train_steps"}
# Variant A of this computation, without its first line, whose result is not used.
UNUSED = {**NEW, "before": "".join(line for line in NEW["before"].splitlines(True) if "warmup" not in line)}
BY_EPOCHS = """\
import math


logger = get_logger(__name__)


def main(args):
    accelerator = Accelerator()
    train_dataloader = DataLoader()

    # Initialize the learning rate scheduler
    lr_scheduler = get_scheduler(
        args.lr_scheduler,
        optimizer=optimizer,
        num_warmup_steps=args.lr_warmup_steps * args.gradient_accumulation_steps,
        num_training_steps=(len(train_dataloader) * args.num_epochs),
    )
    model, optimizer_2, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_epochs * num_update_steps_per_epoch

    return max_train_steps
"""
OLD_AND_N = SCRIPT.format(**OLD, **N_TIMES)
SCHEDULE = OLD_AND_N[OLD_AND_N.index("    lr_scheduler = get_") : OLD_AND_N.index("\n    # Prepare")]
STAND_IN = (
    f"        lr_scheduler = DummyScheduler(total_num_steps={N_TIMES['length']}, num_warmup_steps={N_TIMES['warmup']})\n"
)
DEEPSPEED = OLD_AND_N.replace(SCHEDULE, f"    if args.deepspeed:\n{STAND_IN}    else:\n{textwrap.indent(SCHEDULE, '    ')}")
WRONG = {
    "B, n times": OLD_AND_N,
    "D, g times": SCRIPT.format(**OLD, **G_TIMES),
    "F, neither": SCRIPT.format(**OLD, **PLAIN),
    "E, by epochs": BY_EPOCHS,
    "computed and not passed": SCRIPT.format(**UNUSED | N_TIMES),
}
RIGHT = {
    "A": DONOR_TEXT,
    "A, in another order": DONOR_TEXT.replace(
        "args.num_train_epochs * num_update_steps_per_epoch * accelerator.num_processes",
        "args.num_train_epochs * accelerator.num_processes * num_update_steps_per_epoch",
    ),
    "A, by its full name": DONOR_TEXT.replace("= get_scheduler", "= diffusers.optimization.get_scheduler"),
    "C": SCRIPT.format(**NEW | {"warmup": N_TIMES["warmup"]}),
    "by updates alone": SCRIPT.format(**{**OLD, "before": "", "again": ""}, **N_TIMES),
    "batches are split": SCRIPT.format(**OLD | {"accelerator": "split_batches=True"}, **PLAIN),
}
REFUSED = {
    "makes 2 schedules": OLD_AND_N.replace("    # Prepare everything.", "    other = get_scheduler()"),
    "without get_scheduler": OLD_AND_N.replace("get_scheduler", "get_linear_schedule_with_warmup"),
    "from cfg.lr_warmup_steps": OLD_AND_N.replace("args.lr_warmup_steps", "cfg.lr_warmup_steps"),
    "from train_dataloader.num_batches": OLD_AND_N.replace("len(train_dataloader)", "train_dataloader.num_batches"),
    "too long by the number of processes": DONOR_TEXT.replace("Accelerator()", "Accelerator(split_batches=True)"),
    "in its own way": DONOR_TEXT.replace("args.num_train_epochs * num_up", "2 * args.num_train_epochs * num_up"),
    "uses overrode_max_train_steps in line": OLD_AND_N.replace(
        "    return", "    print(overrode_max_train_steps)\n    return"
    ),
    "uses args.max_train_steps in line": OLD_AND_N.replace("    # Prepare everything.", "    print(args.max_train_steps)"),
    "does not name num_warmup_steps": OLD_AND_N.replace(" num_warmup_steps=", " warmup="),
    "has no logger": OLD_AND_N.replace("logger = ", ""),
    "not valid Python": OLD_AND_N + "(",
    "count num_update_steps_per_epoch again": OLD_AND_N.replace("accelerator.prepare(", "prepared_elsewhere("),
    "a length that spans several lines": OLD_AND_N.replace("args.lr_warmup_steps *", "args.lr_warmup_steps\n*"),
}


class Loader:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


def clock(text, length, processes, accumulation, max_train_steps, epochs=3, warmup=2):
    """What a script gives its schedule, what is right, and the warnings, of `length` batches before they are shared."""
    given, warnings = {}, []
    accelerator = SimpleNamespace(
        num_processes=processes,
        prepare=lambda model, optimizer, loader, schedule: (model, optimizer, Loader(-(-length // processes)), schedule),
    )
    args = SimpleNamespace(
        **{
            "lr_scheduler": "linear",
            "lr_power": 1.0,
            "lr_warmup_steps": warmup,
            "gradient_accumulation_steps": accumulation,
        },
        **{"num_train_epochs": epochs, "num_epochs": epochs, "max_train_steps": max_train_steps, "deepspeed": None},
    )
    names = {
        "get_logger": lambda name: SimpleNamespace(warning=warnings.append),
        "get_scheduler": lambda *args, **kwargs: given.update(kwargs),
        "Accelerator": lambda **kwargs: accelerator,
        "DataLoader": lambda: Loader(length),
        "optimizer": None,
        "model": None,
    }
    # `model` is global in the call of prepare only.
    exec(text.replace("model, optimizer_2, train", "model_2, optimizer_2, train"), names)
    updates = names["main"](args)
    expected = epochs * math.ceil(math.ceil(length / processes) / accumulation)
    assert updates == (expected if max_train_steps is None or "by epochs" in text else max_train_steps)
    return (
        (given["num_warmup_steps"], given["num_training_steps"]),
        (warmup * processes, updates * processes),
        (given.get("power"), warnings),
    )


GRID = [*itertools.product((1, 8, 10, 13), (1, 2, 3), (1, 4))]


@cases("name", WRONG)
def test_the_schedule_becomes_as_long_as_the_training(name):
    old, new = WRONG[name], patched(WRONG[name], DONOR_TEXT).text
    wrong = 0
    for sizes in GRID:
        for max_train_steps in [None] if name.startswith("E") else [None, 7]:
            given, right, (power, warnings) = clock(new, *sizes, max_train_steps)
            assert given == right, (sizes, max_train_steps)
            assert power == (None if name.startswith("E") else 1.0)
            assert warnings == []
            try:
                wrong += clock(old, *sizes, max_train_steps)[0] != right
            except TypeError:  # None * n
                wrong += 1
    assert wrong
    with pytest.raises(AlreadyRight):
        patched(new, DONOR_TEXT)
    removed = [line for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line.startswith("- ")]
    assert all("steps" in line for line in removed)


def test_the_stand_in_under_deepspeed_gets_the_same():
    new = patched(DEEPSPEED, DONOR_TEXT).text
    assert "total_num_steps=num_training_steps_for_scheduler, num_warmup_steps=num_warmup_steps_for_scheduler)" in new
    assert clock(new, 10, 2, 4, None)[0] == (4, 12)


@cases("name", RIGHT)
def test_what_is_right_is_left_alone(name):
    with pytest.raises(AlreadyRight):
        patched(RIGHT[name], DONOR_TEXT)


@cases("reason", REFUSED)
def test_what_is_not_understood_is_refused(reason):
    with pytest.raises(NotPatched, match=reason) as raised:
        patched(REFUSED[reason], DONOR_TEXT)
    assert raised.type is NotPatched


@cases(
    "donor", [OLD_AND_N, "", DONOR_TEXT.replace("            logger.warning", "            pass\n        logger.warning")]
)
def test_a_checkout_without_the_form_is_refused(donor):
    with pytest.raises(LabError, match="does not follow #8312"):
        patched(OLD_AND_N, donor)


# --- in a repository -------------------------------------------------------------------------------------------------

TESTED = "examples/text_to_image/train_tested.py"
UNTESTED = "examples/kandinsky2_2/text_to_image/train_text_to_image_prior.py"
UNKNOWN = "examples/video/train_video.py"
TESTS = "examples/text_to_image/test_text_to_image.py"
TEST_FILE = '''\
import sys
import tempfile


sys.path.append("..")
from test_examples_utils import ExamplesTestsAccelerate, run_command  # noqa: E402


class TestOther(ExamplesTestsAccelerate):
    script_path = "examples/text_to_image/train_other.py"

    def test_other(self):
        with tempfile.TemporaryDirectory() as tmpdir:
            test_args = f"""
                {self.script_path}
                --output_dir {tmpdir}
                """.split()
            run_command(self._launch_args + test_args)


class TestTested(ExamplesTestsAccelerate):
    model = "hf-internal-testing/tiny"

    def test_with_a_name_of_its_own(self):
        model = self.model
        with tempfile.TemporaryDirectory() as tmpdir:
            test_args = f"""
                examples/text_to_image/train_tested.py
                --model {model}
                --output_dir {tmpdir}
                """.split()
            run_command(self._launch_args + test_args)

    def test_tested(self):
        with tempfile.TemporaryDirectory() as tmpdir:
            test_args = f"""
                examples/text_to_image/train_tested.py
                --model={self.model}
                --resolution=64
                --scale_lr
                --max_train_steps=2
                --output_dir={tmpdir}
                """.split()
            test_args.extend(["--prompt", ""])
            run_command(self._launch_args + test_args)


class TestLast(ExamplesTestsAccelerate):
    pass
'''
EXPECTED_TEST = '''
    def test_tested_lr_schedule_by_epochs(self):
        with tempfile.TemporaryDirectory() as tmpdir:
            test_args = f"""
                examples/text_to_image/train_tested.py
                --model={self.model}
                --resolution=64
                --train_batch_size=1
                --gradient_accumulation_steps=4
                --num_train_epochs=4
                --learning_rate=1e-3
                --lr_scheduler=linear
                --lr_warmup_steps=2
                --checkpointing_steps=1
                --output_dir={tmpdir}
                """.split()
            test_args.extend(["--prompt", ""])

            self.check_linear_lr_schedule(test_args, tmpdir)


class TestLast(ExamplesTestsAccelerate):
'''
UTILS = """\
import os
import subprocess

from accelerate.utils import write_basic_config


def run_command(command, return_stdout=False):
    return subprocess.check_output(command)


class ExamplesTestsAccelerate:
    @classmethod
    def setup_class(cls):
        write_basic_config(save_location=os.devnull)
"""
PYPROJECT = """\
[tool.ruff]
line-length = 119

[tool.ruff.lint]
ignore = ["E501", "F821"]
select = ["C", "E", "F", "I", "W"]

[tool.ruff.lint.isort]
lines-after-imports = 2
"""
FILES = {
    "src/diffusers/optimization.py": "",
    "pyproject.toml": PYPROJECT,
    DONOR: DONOR_TEXT,
    TESTED: OLD_AND_N + '\n\nparser.add_argument("--num_train_epochs")\n',
    UNTESTED: OLD_AND_N,
    UNKNOWN: OLD_AND_N,
    TESTS: TEST_FILE,
    HELPERS: UTILS,
    "examples/text_to_image/train_text_to_image_flax.py": OLD_AND_N,
    "examples/community/train_x.py": OLD_AND_N,
    "examples/vqgan/train_vqgan.py": REFUSED["makes 2 schedules"],
}


def git(folder, *arguments):
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diffusers")
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "config", "user.name", "Ada Lovelace")
    git(folder, "config", "user.email", "ada@example.org")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "A commit")
    return folder


@pytest.fixture
def checkout(pristine, tmp_path):
    git(tmp_path, "clone", "--quiet", str(pristine), "diffusers")
    for key in ("user.name", "user.email"):
        git(tmp_path / "diffusers", "config", key, git(pristine, "config", key))
    return tmp_path / "diffusers"


def test_each_script_gets_a_branch_with_its_test(checkout):
    patches = lr_clock_patches(checkout)
    assert git(checkout, "status", "--porcelain") == ""
    by_script = {patch.script: patch for patch in patches}
    assert {path: patch.state for path, patch in by_script.items()} == {
        **dict.fromkeys((TESTED, UNTESTED, UNKNOWN), "patched"),
        DONOR: "right",
        "examples/vqgan/train_vqgan.py": "refused",
    }
    new_test = UNTESTED.replace("train_text", "test_text")
    tests = {TESTED: TESTS, UNTESTED: new_test, UNKNOWN: None}
    for script, test in tests.items():
        patch = by_script[script]
        assert patch.test == test
        assert git(checkout, "rev-list", "--count", f"main..{patch.made}") == "1"
        changed = git(checkout, "diff", "--name-only", "main", patch.made).splitlines()
        assert sorted(changed) == sorted([script, *([test, HELPERS] if test else [])])
        git(checkout, "checkout", "--quiet", patch.made)
        for command in (["check"], ["format", "--check", "--diff"]):
            command = [sys.executable, "-m", "ruff", *command, "--no-cache", *changed]
            done = subprocess.run(command, capture_output=True, text=True, cwd=checkout)
            assert done.returncode == 0, done.stdout + done.stderr
    assert EXPECTED_TEST in git(checkout, "show", f"{by_script[TESTED].made}:{TESTS}")
    assert by_script[TESTED].made == "lr-clock-tested"
    # Where one patch is merged, another brings its helper no more, and the branches merge.
    git(checkout, "checkout", "--quiet", "main")
    for script in (TESTED, UNTESTED):
        git(checkout, "merge", "--quiet", "--no-edit", by_script[script].made)
    assert git(checkout, "show", f"HEAD:{HELPERS}").count("def check_linear_lr_schedule") == 1
    rows = table(patches).splitlines()
    assert f"| {TESTED} | {by_script[TESTED].detail} | lr-clock-tested, test in {TESTS} |" in rows
    assert rows[-1] == "Of 5 scripts: 3 patched, 1 right, 1 refused."


def test_one_script_as_a_file(checkout, tmp_path, capsys):
    out = tmp_path / "one.patch"
    arguments = ["upstream-patch", "lr-clock", "--diffusers", str(checkout), "--script", "train_tested.py"]
    assert lrlab([*arguments, "--out", str(out)]) == 0
    assert f"| {out}, test in {TESTS} |" in capsys.readouterr().out
    assert git(checkout, "branch", "--list").splitlines() == ["* main"]
    git(checkout, "am", "--quiet", str(out))
    assert git(checkout, "log", "-1", "--format=%s") == "Fix the length of the LR schedule in train_tested.py"
    assert lrlab(arguments) == 0
    assert "| unchanged |" in capsys.readouterr().out


def test_what_is_asked_wrongly_is_refused(checkout, tmp_path):
    with pytest.raises(LabError, match="no training script 'tested'"):
        lr_clock_patches(checkout, script="tested")
    with pytest.raises(LabError, match="no training script 'examples/video/train_tested.py'"):
        lr_clock_patches(checkout, script="examples/video/train_tested.py")
    for where in ({"out": tmp_path / "a.patch"}, {"branch": "mine"}):
        with pytest.raises(LabError, match="--script"):
            lr_clock_patches(checkout, **where)
    assert lr_clock_patches(checkout, script=TESTED, branch="mine")[0].made == "mine"
    with pytest.raises(LabError, match="already has a branch 'mine'"):
        lr_clock_patches(checkout, script=TESTED, branch="mine")
    (checkout / HELPERS).write_text("")
    with pytest.raises(LabError, match="uncommitted changes"):
        lr_clock_patches(checkout)
    git(checkout, "rm", "--quiet", "--force", DONOR)
    git(checkout, "commit", "--quiet", "--all", "-m", "Another")
    with pytest.raises(LabError, match=f"has no {DONOR}"):
        lr_clock_patches(checkout)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["lr-clock", "--script", "train_vqgan"], "is left as it is: it makes 2 schedules"),
        (["rex", "--script", "train_vqgan"], "--script is for lr-clock"),
        (["lr-clok"], "lr-clock"),
    ],
)
def test_the_command_line_says_so(checkout, capsys, options, said):
    assert lrlab(["upstream-patch", *options, "--diffusers", str(checkout)]) != 0
    assert said in capsys.readouterr().err
