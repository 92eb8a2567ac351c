"""Batches: what is done to them is done to data and conditions alike."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffusers_lrlab.data.batch import Batch, to_device

KEYWORDS = ("class_labels", "encoder_hidden_states")


@st.composite
def batches(draw, least=0):
    """Rows that are known by a number, which data and conditions have."""
    rows = torch.tensor(draw(st.lists(st.integers(0, 255), min_size=least, max_size=12)), dtype=torch.int64)
    data = rows[:, None].expand(-1, draw(st.integers(1, 3)))
    data = data.to(torch.uint8) if draw(st.booleans()) else data.float()
    told = draw(st.sets(st.sampled_from(KEYWORDS)))
    shapes = {"class_labels": rows, "encoder_hidden_states": rows[:, None, None].expand(-1, 2, 2).float()}
    return Batch(data, {keyword: shapes[keyword] for keyword in sorted(told)})


def assert_same(first, second):
    assert first.conditions.keys() == second.conditions.keys()
    pairs = [(first.data, second.data), *((first.conditions[each], second.conditions[each]) for each in first.conditions)]
    for one, other in pairs:
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def assert_of_one_row(batch):
    """Data and conditions of each row are still the same number."""
    rows = batch.data[:, 0].long()
    for values in batch.conditions.values():
        assert torch.equal(values.flatten(1)[:, 0].long() if values.ndim > 1 else values, rows)


@given(batch=batches(least=1), cuts=st.lists(st.integers(0, 12), max_size=4))
def test_the_slices_of_a_batch_joined_are_the_batch(batch, cuts):
    ends = [0, *sorted(min(cut, len(batch)) for cut in cuts), len(batch)]
    parts = [batch[slice(*part)] for part in zip(ends, ends[1:], strict=False)]
    assert sum(map(len, parts)) == len(batch)
    assert_same(Batch.join(parts), batch)


@given(batch=batches(), numbers=st.data())
def test_chosen_rows_keep_their_conditions(batch, numbers):
    rows = numbers.draw(st.lists(st.integers(0, len(batch) - 1), max_size=9)) if len(batch) else []
    for chosen in (batch[rows], batch[torch.tensor(rows, dtype=torch.int64)]):
        assert_of_one_row(chosen)
        assert chosen.data[:, 0].tolist() == batch.data[rows][:, 0].tolist()
    order = numbers.draw(st.permutations(range(len(batch))))
    assert_same(batch[torch.tensor(order, dtype=torch.int64)][torch.tensor(order, dtype=torch.int64).argsort()], batch)
    assert_of_one_row(batch[batch.data[:, 0] > 9])


@given(batch=batches())
def test_moving_changes_nothing_but_the_levels(batch):
    assert_same(batch.to("cpu"), batch)
    assert_same(pickle.loads(pickle.dumps(batch)), batch)  # to the processes of a loader and of a study
    moved = to_device(batch, torch.device("cpu"))
    assert moved.data.dtype == torch.float32
    assert_same(moved, batch.normalised())
    assert_same(moved.with_data(batch.data), batch)


def test_a_batch_is_no_sequence_of_rows():
    with pytest.raises(TypeError, match="a slice or several row numbers"):
        list(Batch(torch.zeros(3, 2)))
