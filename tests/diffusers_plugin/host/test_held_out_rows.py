"""Rows that are held out of a script's data."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.diffusers_plugin.host.held_out_rows import HeldOutRows
from diffusers_lrlab.diffusers_plugin.script.source import HostScript, NotRecognised

SCRIPTS = {name: Path(__file__).parents[2] / "scripts" / f"{name}_script.py" for name in ("ddpm", "flow", "resume")}


class Repeated(torch.utils.data.Dataset):
    """As in textual inversion: more rows than images."""

    def __init__(self, num_images):
        self.num_images = num_images

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index % self.num_images


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([1, 2])


@pytest.mark.parametrize(("size", "processes", "num"), [(1, 1, 5), (2, 1, 4), (3, 1, 6), (4, 1, 4), (2, 2, 4), (7, 1, 7)])
def test_whole_batches_are_held_back(monkeypatch, size, processes, num):
    state = SimpleNamespace(num_processes=processes, process_index=0)
    monkeypatch.setattr("accelerate.state.PartialState", lambda: state)
    whole = ast.parse("ids = torch.ones(args.train_batch_size, 2)").body[0]
    held_out, trained = held_out_rows(list(range(38)), 0.13, whole=whole, batch_size=size)
    assert (len(held_out) * processes, len(held_out) % size, len(trained)) == (num, 0, 38 - num)
    message = r"line 1: ids = torch.ones\(args.train_batch_size, 2\)\), so only whole batches .* than a batch of 8"
    with pytest.raises(LabError, match=message):
        held_out_rows(list(range(38)), whole=whole, batch_size=8 // processes)


def held_out_rows(dataset, fraction=0.2, script="resume", arguments=None, most=None, whole=None, **given):
    """The rows that are held out, and those to train on."""
    run = SimpleNamespace(arguments=arguments or {})
    held_out = HeldOutRows(HostScript(str(SCRIPTS.get(script, script))), run, fraction, most, whole)
    trained = held_out.split(torch.utils.data.DataLoader.__init__, dataset, **given)
    assert held_out.loader.num_workers == 0
    return held_out.loader.dataset.indices, trained.indices


def test_rows_are_the_same_for_every_seed_and_never_trained_on():
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(held_out_rows(list(range(20)), batch_size=3, num_workers=2))
    assert found[0] == found[1]
    held_out, trained = found[0]
    assert len(held_out) == 4
    assert sorted([*held_out, *trained]) == list(range(20))
    assert len(held_out_rows(list(range(20)), most=2)[0]) == 2
    assert len(held_out_rows(list(range(20)), most=5)[0]) == 4
    with pytest.raises(LabError, match="cannot hold out a row of 3"):
        held_out_rows([1, 2, 3])


def test_a_whole_batch_is_left_to_train_on():
    """A script that drops smaller ones would train on nothing, and end as if it had."""
    with pytest.raises(LabError, match="leaves 7 of 8 rows for training: less than a batch of 8"):
        held_out_rows(list(range(8)), batch_size=8, drop_last=True)
    assert len(held_out_rows(list(range(8)), batch_size=8)[1]) == 7
    assert len(held_out_rows(list(range(8)), batch_size=7, drop_last=True)[1]) == 7


@pytest.mark.parametrize(
    ("dataset", "how", "reason"),
    [
        (list(range(20)), {"sampler": [1]}, "a custom sampler"),
        (Stream(), {}, "its data are a stream"),
        (list(range(20)), {"arguments": {"repeats": 2}}, "in several rows .--repeats 2"),
        (Repeated(5), {"script": __file__}, "in several of its 20 rows .num_images is 5"),
    ],
    ids=["sampler", "stream", "repeats", "modulo"],
)
def test_data_that_are_refused(dataset, how, reason):
    with pytest.raises(NotRecognised, match=reason):
        held_out_rows(dataset, **how)


def test_rows_of_images_that_are_there_once():
    assert len(held_out_rows(Repeated(20), script=__file__)[0]) == 4
