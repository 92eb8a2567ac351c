"""Images that are kept decoded, and batches that are read ahead."""

import itertools
import multiprocessing
import shutil
import threading

import pytest
import torch
from filelock import FileLock
from helpers import image_folder, load, stacked
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.files import unfinished
from diffusers_lrlab.data.batches import iterate_batches
from diffusers_lrlab.data.layout import BatchLayout
from diffusers_lrlab.data.prefetch import prefetched

FAST = {"decoding": "uint8", "random_flip": True}
CACHED = {**FAST, "cache_decoded": True}


def batches(data, num_workers=0, **options):
    return stacked(iterate_batches(data, BatchLayout(4, 2), 0, range(5), num_workers, **options))


@pytest.fixture
def folder(tmp_path):
    return image_folder(tmp_path / "images", size=(6, 5))


def written(folder):
    return sorted(path for path in (folder.parent / "cache" / "lrlab-decoded").iterdir() if path.is_dir())


def test_kept_images_are_those_that_are_decoded(folder, capsys, monkeypatch):
    expected = batches(load(folder, in_memory_limit_mb=0, **FAST))
    first = load(folder, **CACHED)
    assert "writes about 0.0 MiB" in capsys.readouterr().err
    monkeypatch.setattr("diffusers_lrlab.data.images.decode", None)  # from here on nothing is decoded
    for data in (first, load(folder, seed=5, **CACHED)):
        assert data.num_images == 20
        assert data.decoded[3].dtype == torch.uint8
        assert data.all_in_memory(7).data.shape == (7, 1, 4, 4)
    assert torch.equal(batches(first), expected)
    assert torch.equal(batches(first, num_workers=1), expected)
    assert len(written(folder)) == 1


@pytest.mark.slow
@cases("name", ["pixels.bin", "sizes.npy", "problems.json"])
@cases("damage", ["cut off", "empty", "gone"])
def test_damaged_files_are_not_read(folder, name, damage):
    load(folder, **CACHED)
    file = written(folder)[0] / name
    content = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(content[:-1] if damage == "cut off" else b"")
    with pytest.raises(LabError, match=r"is damaged\. Remove that folder"):
        load(folder, **CACHED)
    file.write_bytes(content)


def test_what_killed_processes_left_is_removed(folder):
    load(folder, **CACHED)
    (whole,) = written(folder)
    shutil.rmtree(whole)
    begun = unfinished(whole)
    begun.mkdir(parents=True)
    (begun / "pixels.bin").write_bytes(b"half")
    load(folder, **CACHED)
    assert written(folder) == [whole]


def test_another_process_that_writes_is_waited_for(folder, monkeypatch):
    load(folder, **CACHED)
    (whole,) = written(folder)
    whole.rename(whole.with_name("aside"))
    begun, waited_for, told = threading.Event(), threading.Event(), []

    class Lock(FileLock):
        def acquire(self, *args, **options):
            waited_for.set()
            return super().acquire(*args, **options)

    def write():
        with FileLock(whole.with_suffix(".lock")):
            begun.set()
            waited_for.wait(60)
            whole.with_name("aside").rename(whole)

    monkeypatch.setattr("diffusers_lrlab.data.decoded.FileLock", Lock)
    monkeypatch.setattr("diffusers_lrlab.data.decoded.warn", told.append)
    other = threading.Thread(target=write)
    other.start()
    assert begun.wait(60)
    load(folder, **CACHED)
    other.join()
    assert told == []  # this process writes nothing


def test_other_transforms_and_data_have_files_of_their_own(folder):
    load(folder, **CACHED)
    for options in ({"decoding": "draft"}, {"resolution": 3}, {"center_crop": True}, {"num_validation_images": 2}):
        before = len(written(folder))
        load(folder, **{**CACHED, **options})
        assert len(written(folder)) == before + 1


def test_a_corrupt_image_is_named_and_nothing_is_kept_of_it(folder):
    (folder / "even" / "004.png").write_bytes(b"nothing")
    with pytest.raises(LabError, match=r"even/004\.png.*--skip_corrupt_images"):
        load(folder, **CACHED)
    assert written(folder) == []
    for _ in range(2):
        data = load(folder, skip_corrupt_images=True, **CACHED)
        assert len(data.skipped) == 1
        lazy = load(folder, skip_corrupt_images=True, in_memory_limit_mb=0, **FAST)
        assert torch.equal(batches(data, skip_corrupt=True), batches(lazy, skip_corrupt=True))
    with pytest.raises(LabError, match=r"even/004\.png"):
        batches(data)


def test_a_disk_that_is_too_small_is_an_error_before_anything_is_written(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**31, 2**31, 2**29))
    with pytest.raises(LabError, match=r"--cache_decoded needs 0\.0 GiB in .*, where 0\.5 are free, .*--cache_dir"):
        load(folder, **CACHED)
    assert written(folder) == []


@pytest.mark.slow
def test_two_processes_may_write_at_once(folder):
    load(folder, in_memory_limit_mb=0)  # what datasets itself keeps
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=load, args=(folder,), kwargs=CACHED) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert torch.equal(batches(load(folder, **CACHED)), batches(load(folder, in_memory_limit_mb=0, **FAST)))


def test_what_cannot_be_kept_is_refused(folder):
    with pytest.raises(LabError, match="--cache_decoded has no effect without --decoding uint8 or draft. Hint: add that"):
        load(folder, cache_decoded=True)
    with pytest.raises(LabError, match="--cache_decoded has no effect with --streaming. Hint: leave one of them out."):
        load(folder, streaming=True, max_train_steps=1, **CACHED)


# --- batches ahead ---------------------------------------------------------------------------------------------------


def test_batches_that_are_read_ahead_are_the_same():
    assert torch.stack(list(prefetched(torch.tensor(number) for number in range(9)))).tolist() == list(range(9))
    assert list(prefetched(torch.tensor(number) for number in range(0))) == []


def test_an_error_comes_where_the_batch_would():
    def failing():
        yield torch.tensor(1)
        raise LabError("gone")

    ahead = prefetched(failing())
    assert next(ahead) == 1
    with pytest.raises(LabError, match="gone"):
        next(ahead)


def test_who_stops_early_leaves_no_thread_and_closes_the_source():
    closed = []

    def source():
        try:
            yield from map(torch.tensor, itertools.count())
        finally:
            closed.append(True)

    ahead = prefetched(source())
    assert [int(next(ahead)) for _ in range(3)] == [0, 1, 2]
    ahead.close()
    assert closed == [True]
    assert "read batches" not in {thread.name for thread in threading.enumerate()}


def test_the_end_does_not_wait_for_a_source_that_hangs(monkeypatch):
    """That of a stream is waited for for minutes, one of files for ever."""
    monkeypatch.setattr("diffusers_lrlab.data.prefetch._JOIN_SECONDS", 0.01)
    goes_on, ended = threading.Event(), threading.Event()

    def hanging():
        yield torch.tensor(1)
        goes_on.wait(60)
        ended.set()

    ahead = prefetched(hanging())
    assert next(ahead) == 1
    ahead.close()
    assert not ended.is_set()
    goes_on.set()
    assert ended.wait(60)


def test_a_slow_source_is_read_while_others_work():
    begun = [threading.Event() for _ in range(5)]

    def source():
        for number, event in enumerate(begun):
            event.set()
            yield torch.tensor(number)

    for number, _ in enumerate(prefetched(source())):
        following = begun[min(number + 1, 4)]
        assert following.wait(60)  # before it is asked for
