"""Scripts that are killed and go on, to the bit: in this process by their loaders alone, and (slow) as launched scripts."""

import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from test_launch import launch

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.diffusers_plugin.hooks import resume
from diffusers_lrlab.diffusers_plugin.host.generators import find_generators, get_states, set_states
from diffusers_lrlab.diffusers_plugin.host.watched_loader import WatchedLoader
from diffusers_lrlab.diffusers_plugin.script.source import HostScript, NotRecognised

SCRIPT = Path(__file__).parents[1] / "scripts" / "resume_script.py"


class Augmented(torch.utils.data.Dataset):
    """Draws by every kind of generator, one of its own among them."""

    def __init__(self, size, changed=0.0):
        self.size, self.changed, self.own, self.num_read = size, changed, random.Random(3), 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.num_read += 1
        return torch.tensor([index + self.changed, random.random(), np.random.rand(), self.own.random()]) + torch.rand(1)


class InPlace(torch.utils.data.BatchSampler):
    """Shuffles what it shuffled before, as diffusers' samplers of buckets do."""

    def __init__(self, size):
        self.batches, self.batch_size, self.drop_last = [[n, n + 1] for n in range(0, size, 2)], 2, False

    def __iter__(self):
        random.shuffle(self.batches)
        yield from self.batches

    def __len__(self):
        return len(self.batches)


def watched(workers=0, in_place=False, seedable=False, **how):
    """A loader of six batches in a new process, as far as generators go."""
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    data = Augmented(12, **how)
    order = {"batch_sampler": InPlace(12)} if in_place else {"batch_size": 2, "shuffle": True}
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, num_workers=workers, **order))
    return WatchedLoader(HostScript(str(SCRIPT)), loader, lambda: False), data


def batches_of(watcher):
    """Over epochs without an end; the training draws, too."""
    for batch in itertools.chain.from_iterable(iter(lambda: watcher.loader, None)):
        yield batch, torch.rand(1).item()


def taken(batches, number):
    return [(batch.tolist(), drawn) for batch, drawn in itertools.islice(batches, number)]


@pytest.mark.parametrize("how", [{}, {"in_place": True}, {"seedable": True}])
@pytest.mark.parametrize("at", [1, 4, 6, 11, 12])
def test_a_loader_goes_on_where_it_was(how, at):
    """Within an epoch and at its end; batches before are not read again."""
    watcher, _ = watched(**how)
    batches = batches_of(watcher)
    taken(batches, at)
    state = json.loads(json.dumps(watcher.state()))
    expected = taken(batches, 9)
    watcher, data = watched(**how)
    torch.rand(7), random.random()  # as a script may draw before it resumes
    watcher.resumed = state
    assert taken(batches_of(watcher), 1) == expected[:1]
    assert data.num_read <= 4  # that batch and the next
    watcher, _ = watched(**how)
    watcher.resumed = state
    assert taken(batches_of(watcher), 9) == expected


def test_workers_go_on_where_they_were():
    watcher, _ = watched(workers=2)
    batches = batches_of(watcher)
    taken(batches, 4)
    state = json.loads(json.dumps(watcher.state()))
    expected = taken(batches, 5)
    watcher, _ = watched(workers=2)
    watcher.resumed = state
    assert taken(batches_of(watcher), 5) == expected


def test_a_checkpoint_before_the_last_batch_of_an_epoch():
    """The run that is not killed returns to its states for that batch alone, not for the next epoch again."""
    watcher, _ = watched()
    batches = batches_of(watcher)
    taken(batches, 5)
    state = json.loads(json.dumps(watcher.state()))
    watcher.after_save = state["now"]
    expected = taken(batches, 9)
    watcher, _ = watched()
    watcher.resumed = state
    assert taken(batches_of(watcher), 9) == expected


def test_a_second_resume_begins_where_the_first_one_was():
    watcher, _ = watched()
    batches = batches_of(watcher)
    taken(batches, 3)
    first = watcher.state()
    taken(batches, 1)
    second = watcher.state()
    watcher, _ = watched()
    watcher.resumed = first
    taken(batches_of(watcher), 1)
    assert watcher.state() == second


def test_other_data_are_an_error():
    watcher, _ = watched()
    taken(batches_of(watcher), 2)
    state = watcher.state()
    watcher, _ = watched(changed=0.5)
    watcher.resumed = state
    with pytest.raises(LabError, match="batch 3 of this epoch is not what it was"):
        taken(batches_of(watcher), 1)


def test_what_is_drawn_after_a_checkpoint_leaves_no_trace():
    watcher, _ = watched()
    batches = batches_of(watcher)
    taken(batches, 2)
    state = watcher.state()
    watcher.after_save = state["now"]
    torch.rand(3)
    expected = taken(batches, 3)
    watcher, _ = watched()
    watcher.resumed = state
    assert taken(batches_of(watcher), 3) == expected


def test_states_of_all_kinds_of_generators():
    def make():
        kinds = [torch.Generator(), np.random.default_rng(), np.random.RandomState(), random.Random()]
        return find_generators({"script": dict(zip("abcd", kinds, strict=True)) | {"e": 3}})

    def draw(kinds):
        a, b, c, d = (kinds[f"script.{name}"] for name in "abcd")
        return [torch.rand(1, generator=a).item(), b.random(), c.rand(), d.random(), torch.rand(1).item()]

    kinds = make()
    states = json.loads(json.dumps(get_states(kinds)))
    expected = draw(kinds)
    others = make()
    set_states(states, others)
    assert draw(others) == expected


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"num_workers": 1, "persistent_workers": True}, "live on from epoch to epoch"),
        ({"batch_size": None}, "no batches of indices"),
    ],
)
def test_loaders_that_are_refused(how, reason):
    loader = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(Augmented(4), **how))
    with pytest.raises(NotRecognised, match=reason):
        WatchedLoader(HostScript(str(SCRIPT)), loader, lambda: False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("accelerator.load_state(path)", "does not both write checkpoints"),
        ("a.save_state(p); a.load_state(p); skip_first_batches(loader, 3)", "passes over batches"),
        ("a.save_state(p); a.load_state(p); wds.WebLoader(data)", "its data are a stream"),
    ],
)
def test_scripts_that_are_refused(tmp_path, text, reason):
    (tmp_path / "script.py").write_text(text)
    with pytest.raises(NotRecognised, match=reason):
        resume.recognise(HostScript(str(tmp_path / "script.py")))


def test_caches_by_the_number_of_the_batch_are_refused(tmp_path):
    """A resumed script counts batches from 0 again."""
    (tmp_path / "script.py").write_text(
        "for step, batch in enumerate(train_dataloader):\n    latents = latents_cache[step]\n"
        "for index, name in enumerate(names):\n    names[index]\n"
    )
    script = HostScript(str(tmp_path / "script.py"))
    assert script.cached_by_step == ["latents_cache"]
    watcher, _ = watched()
    watcher.script = script
    taken(batches_of(watcher), 1)
    watcher._variables = lambda: {"latents_cache": [1, 2]}
    with pytest.raises(LabError, match=r"takes latents_cache\[step\] for each batch"):
        taken(batches_of(watcher), 1)


def test_checkpoints_of_other_numbers_are_refused(tmp_path):
    hook = resume.ResumeHook(HostScript(str(SCRIPT)), SimpleNamespace(run=SimpleNamespace()), {})
    hook.run.accelerator = SimpleNamespace(num_processes=2)
    hook.loader = SimpleNamespace(facts=lambda: {"rows": 3})
    saved = {"version": 1, "facts": {"processes": 1, "rows": 3}}
    (tmp_path / resume.FILE).write_text(json.dumps(saved))
    with pytest.raises(LabError, match="the number of processes was 1 when the checkpoint was written, and is 2 now"):
        hook._load(tmp_path)


@pytest.mark.parametrize(
    ("after", "updates", "warning"),
    [
        ("", 5, "saves its result within its epochs"),
        ("", 4, None),
        ("model.save_pretrained(a)", 5, None),
        ("model.save_pretrained(a); log_validation(epoch)", 5, "uses `epoch` after its epochs"),
        ("model.save_pretrained(a); log_validation(epoch)", 4, None),
    ],
)
def test_what_is_done_within_epochs_or_needs_one(tmp_path, after, updates, warning):
    """A script that is resumed after its last update has no epoch left, and saves nothing, or fails."""
    (tmp_path / "script.py").write_text(
        f"a.save_state(p); a.load_state(p)\nfor epoch in range(first_epoch, 3):\n    model.save_pretrained(a)\n{after}\n"
    )
    said = []
    accelerator = SimpleNamespace(num_processes=1, process_index=0)
    run = SimpleNamespace(accelerator=accelerator, warn=said.append)
    clock = SimpleNamespace(run=run, count_updates=lambda: 5, outside_checkpoints=list)
    hook = resume.ResumeHook(HostScript(str(tmp_path / "script.py")), clock, {})
    hook.loader = SimpleNamespace(facts=dict)
    mine = {"micro_batches": 0, "loader": {}, "hooks": {}}
    saved = {"version": 1, "updates": updates, "facts": {"processes": 1}, "processes": [mine]}
    (tmp_path / resume.FILE).write_text(json.dumps(saved))
    hook._load(tmp_path)
    assert [warning in text for text in said] == [True] * (warning is not None)


# --- launched and killed -------------------------------------------------------------------------------------------------


def end_of(folder, script, *arguments, kills=(), processes=1):
    """What a script ends with that is killed after some micro-batches of each start: losses by update, and all states."""
    folder.mkdir()
    own = [f"--output_dir={folder}", "--resume_from_checkpoint=latest", *arguments]
    how = {"options": ["--exact_resume", "--strict", "--log_timesteps"], "processes": processes}
    for kill in kills:
        launch(script, *own, f"--kill_at={kill}", expect=-9, **how)
    stderr = launch(script, *own, **how)
    losses = [sorted({*path.read_text().splitlines()}) for path in sorted(folder.glob("losses-*.jsonl"))]
    import pyarrow.parquet as pq

    log = pq.read_table(folder / "lrlab" / "timesteps.parquet")
    assert not [*folder.glob(".tmp-lrlab-*")]
    return [json.loads((folder / "end.json").read_text()), losses, log], stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "kills", "processes"),
    [
        (["--checkpointing_steps=2"], (6, 3, 5), 1),
        (["--gradient_accumulation_steps=4", "--buckets", "--max_train_steps=7"], (6, 11), 1),
        (["--dataloader_num_workers=2", "--checkpointing_steps=3", "--draw_after_saving"], (5, 10), 1),
        (["--kill_while_saving", "--resume_step"], (4, 6), 1),
        (["--checkpointing_steps=1"], (14,), 1),  # at the last update, whose checkpoint is there
        (["--skipped_updates"], (14,), 1),  # the same, where the schedule has made fewer steps than there were updates
        (["--gradient_accumulation_steps=2", "--draw_after_saving"], (8, 6), 2),
    ],
)
def test_killed_scripts_end_with_the_same_bits(tmp_path, arguments, kills, processes):
    script = SCRIPT
    if "--resume_step" in arguments:  # which drops batches itself, like train_unconditional.py
        arguments = [argument for argument in arguments if argument != "--resume_step"]
        text = SCRIPT.read_text()
        text = text.replace("# a test puts in: resume_step", "resume_step = global_step % per_epoch")
        condition = "if args.resume_from_checkpoint and epoch == first_epoch and found and step < resume_step:"
        text = text.replace("# a test puts in: continue", f"{condition}\n                continue")
        script = tmp_path / "script.py"
        script.write_text(text)
    whole, _ = end_of(tmp_path / "whole", script, *arguments, processes=processes)
    killed, stderr = end_of(tmp_path / "killed", script, *arguments, kills=kills, processes=processes)
    assert killed == whole
    assert "--exact_resume: " in stderr
    assert "It went on after update" in stderr


@pytest.mark.slow
def test_checkpoints_without_the_option_and_streams(tmp_path):
    own = [f"--output_dir={tmp_path}", "--checkpointing_steps=2"]
    launch(SCRIPT, *own, "--kill_at=3", expect=-9)
    stderr = launch(SCRIPT, *own, "--resume_from_checkpoint=latest", options=["--exact_resume"])
    assert "was written without --exact_resume: the data of its epoch begin again" in stderr
    message = "--exact_resume cannot be used in this script: its data are a stream"
    assert message in launch(SCRIPT, *own, "--stream", options=["--exact_resume", "--strict"], expect=2)
