"""What is attacked: commands, how each goes on, and what must be the same at the end, however often it was stopped."""

import contextlib
import functools
import json
import re
import shutil
import sys
from pathlib import Path

import pandas
import published
import runs
import torch
import yaml
from hub_server import Fault, HubServer

from .injected import FAULTS, count_and_strike

MODEL = {"_class_name": "MLPDenoiser", "hidden_size": 8, "num_layers": 1, "embedding_size": 4}
# Four checkpoints of which two are kept, a pipeline that is saved twice, and diagnostics in a file of their own.
OPTIONS = """--dataset_name=moons --max_train_steps=8 --checkpointing_steps=2 --checkpoints_total_limit=2 --logging_steps=1
    --save_model_epochs=1 --validation_steps=3 --timestep_sampler=loss_second_moment:history=2 --train_batch_size=500
    --num_validation_images=20 --distance_samples=0 --eval_batch_size=4 --ddpm_num_steps=4 --num_inference_steps=2
    --log_timestep_bins=2 --no_preflight""".split()
LATEST = "--resume_from_checkpoint=latest"
STUDY = {
    "base": {
        "model_config_name_or_path": "config.json",
        **{"max_train_steps": 6, "train_batch_size": 16, "ddpm_num_steps": 4, "num_inference_steps": 2},
        **{"num_validation_images": 20, "distance_samples": 20, "checkpointing_steps": 2, "learning_rate": 1e-3},
    },
    "arms": {"constant": {"lr_scheduler": "constant"}, "cosine": {"lr_scheduler": "cosine"}},
    "datasets": ["moons"],
    "seeds": 2,
    "metrics": ["energy_distance", "validation_loss_ema"],
    "evaluation_points": 2,
}
_SCRIPTS = Path(__file__).parents[1] / "scripts"
_LRLAB = ["-m", "diffusers_lrlab.cli.main"]
# Figures in records that are about time and place.
_TIMES = re.compile(
    r"seconds|hours|started|starts|ended|memory|^meta$|^sha256$|^output_dir$|^command$|^resume_from_checkpoint$"
)


class Case:
    """A command in a folder that is a copy of `made_from`, or does not exist; `again` is given after it was stopped."""

    faults = tuple(FAULTS)

    def __init__(self, base, name, start, again=None, made_from=None, patch=None):
        self.base, self.name, self.made_from, self.patch = base, name, made_from, patch
        self.start, self.again = start, again or start  # from the folder to the command
        self.env = runs.environment()

    def folder(self, place):
        """Where it happens, for one of the attacks; its last part is the same for all, as it may be written down."""
        folder = self.base / f"{self.name}-{place}" / "out"
        folder.parent.mkdir()
        if self.made_from is not None:
            shutil.copytree(self.made_from, folder)
        return folder

    def before(self, folder, at, fault, count_file, pipe):
        """What is called in its process, first."""
        strike = functools.partial(count_and_strike, str(folder), at, fault, str(count_file), pipe)
        return functools.partial(_do_all, [*filter(None, [self.patch]), strike])

    def struck(self, process, at, fault, count_file):
        """What else happens to its process meanwhile."""
        return contextlib.nullcontext()

    def end(self, folder):
        """From the names of its files to what must be the same."""
        return end_of(folder)


class Push(Case):
    """The upload of a finished run to a repository of its own; what is there must be whole."""

    faults = ("SIGKILL", "SIGTERM", "SIGINT")

    def __init__(self, base, hub):
        super().__init__(base, "push", self._command)
        self.hub, self.env = hub, hub.env
        self.made_from = published.run_folder(base / "to-push")

    def _command(self, folder):
        return [*_LRLAB, "push", folder, f"--repo_id=user/{folder.parent.name.replace(' ', '-')}"]

    def before(self, folder, at, fault, count_file, pipe):
        return published.wait_briefly

    @contextlib.contextmanager
    def struck(self, process, at, fault, count_file):
        """It writes no files: what is counted are its requests, and the fault comes when the server has got that one."""
        seen = 0

        def look():
            nonlocal seen
            seen += 1
            if seen == at:
                process.send_signal(FAULTS[fault])

        self.hub.faults = [Fault(".", times=sys.maxsize, then=look)]
        yield
        self.hub.faults = []
        count_file.write_text(str(seen))

    def end(self, folder):
        repo = self.hub.repos.get(("models", f"user/{folder.parent.name.replace(' ', '-')}"))
        own = folder.parent.name.replace(" ", "-").encode()
        files = {name: content.replace(own, b"") for name, content in repo.files.items()} if repo else {}
        # The card names the repository, so the sums in the manifest differ.
        return files | {name: b"there" for name in files if name == "manifest.json"}


def differences(first, second):
    """The files that are not the same bits in two folders, but for what is about time."""
    return differing(end_of(first), end_of(second))


def differing(first, second):
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def without_other_checkpoints(*ends):
    """Without checkpoints that only one end has: to checkpoints_total_limit one of a signal counts as any other."""
    of_both = set.intersection(*({name.partition("/")[0] for name in end} for end in ends))
    return [
        {name: end[name] for name in end if not name.startswith("checkpoint-") or name.partition("/")[0] in of_both}
        for end in ends
    ]


def end_of(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): _content(path) for path in files}


def _content(path):
    if path.suffix in (".png", ".html", ".md", ".tex") or path.name in ("manifest.json", "summary.parquet", "cost.csv"):
        return "there"  # of other files, and with times
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # it may be damaged
        if path.name == "state.pt":
            return _bytes_of(torch.load(path, weights_only=True))
        if path.name == "runs.parquet":
            runs = pandas.read_parquet(path)
            return runs[[name for name in runs if not name.endswith("_seconds")]].to_json()
        if path.suffix == ".json":
            content = _without_times(json.loads(path.read_text()))
            return {**content, "config": None} if path.name == "trainer.json" else content
    return path.read_bytes()


def _bytes_of(value):
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: _bytes_of(item) for key, item in value.items() if key != "seconds"}
    return [_bytes_of(item) for item in value] if isinstance(value, list) else value


def _without_times(value):
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if not _TIMES.search(key)}
    return [_without_times(item) for item in value] if isinstance(value, list) else value


def _do_all(steps):
    for step in steps:
        step()


def save_stacks_often():
    """Called in the process of a study: states of stacks are saved after every update, and not once a minute."""
    from diffusers_lrlab.study.stacked import stacks

    stacks._SAVE_SECONDS = 0.0


@contextlib.contextmanager
def all_cases(base):
    """Those of a folder, by name. Where one goes on from the end of another, that is made when it is first asked for."""
    (base / "config.json").write_text(json.dumps(MODEL))
    (base / "study.yaml").write_text(yaml.safe_dump(STUDY))
    model = f"--model_config_name_or_path={base / 'config.json'}"
    done = base.joinpath

    def train(*more):
        return lambda folder: [runs.SCRIPT, *OPTIONS, model, *more, f"--output_dir={folder}"]

    def study(*more):
        return lambda folder: [*_LRLAB, "study", "run", base / "study.yaml", f"--out={folder}", *more]

    def find(folder):
        few = ["--num_updates=20"]
        return [*_LRLAB, "find-lr", "--dataset_name=moons", model, f"--output_dir={folder}", *few]

    def export(folder):
        return [*_LRLAB, "data", "export", "moons", folder, "--n=200", "--n_test=50"]

    pool = study("--executor=pool", "--workers=2", f"--import={_SCRIPTS / 'saves_often.py'}")
    auto = "--learning_rate=auto"
    with HubServer(base / "hub") as hub:
        cases = [
            Case(base, "run", train(), train(LATEST)),
            Case(base, "resumed run", train(LATEST), made_from=done("run-whole/out")),
            Case(base, "going back", train("--resume_from_checkpoint=checkpoint-6"), train(LATEST), done("run-whole/out")),
            Case(base, "run with auto rate", train(auto), train(auto, LATEST)),
            Case(base, "study", study(), patch=save_stacks_often),
            Case(base, "resumed study", study(), made_from=done("study-stopped/out"), patch=save_stacks_often),
            Case(base, "local study", study("--executor=local")),
            Case(base, "resumed local study", study("--executor=local"), made_from=done("local study-stopped/out")),
            Case(base, "pool study", pool),
            Case(base, "finder", find),
            Case(base, "export", export),
            Push(base, hub),
        ]
        yield {case.name: case for case in cases}
