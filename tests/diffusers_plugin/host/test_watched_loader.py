"""Dataloaders that resume at a batch of an epoch, to the bit."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.diffusers_plugin.host.watched_loader import WatchedLoader
from diffusers_lrlab.diffusers_plugin.script.source import HostScript, NotRecognised

SCRIPT = Path(__file__).parents[2] / "scripts" / "resume_script.py"


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
    with pytest.raises(LabError, match="batch 3 of this epoch differs from when the checkpoint was written"):
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


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"num_workers": 1, "persistent_workers": True}, "persist across epochs"),
        ({"batch_size": None}, "no batch sampler"),
    ],
    ids=["persistent_workers", "no_batch_sampler"],
)
def test_loaders_that_are_refused(how, reason):
    loader = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(Augmented(4), **how))
    with pytest.raises(NotRecognised, match=reason):
        WatchedLoader(HostScript(str(SCRIPT)), loader, lambda: False)


def test_caches_by_the_number_of_the_batch_are_refused(tmp_path):
    """A resumed script counts batches from 0 again."""
    (tmp_path / "script.py").write_text(
        "for step, batch in enumerate(train_dataloader):\n    latents = latents_cache[step]\n"
        "for index, name in enumerate(names):\n    names[index]\n"
    )
    script = HostScript(str(tmp_path / "script.py"))
    assert script.indexed_by_step == ["latents_cache"]
    watcher, _ = watched()
    watcher.script = script
    taken(batches_of(watcher), 1)
    watcher._variables = lambda: {"latents_cache": [1, 2]}
    with pytest.raises(LabError, match=r"reads latents_cache\[step\] for each batch"):
        taken(batches_of(watcher), 1)
