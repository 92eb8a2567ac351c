"""The same images in the same places, whatever the format, the workers and the processes."""

import io

import datasets
import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from helpers import load, stacked, write_tar
from PIL import Image

from diffusers_lrlab.data.batches import iterate_batches
from diffusers_lrlab.data.options import BatchLayout

NUM_IMAGES, BATCH, UPDATES = 26, 8, range(2, 6)  # into the second epoch


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same JPEGs as files, in Parquet and in tar files."""
    root = tmp_path_factory.mktemp("formats")
    noise = np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, 4, 5, 3), dtype=np.uint8)
    files = []
    for pixels in noise:
        file = io.BytesIO()
        Image.fromarray(pixels).resize((40, 32)).save(file, "jpeg", quality=90)
        files.append(file.getvalue())
    for name in ("images", "parquet", "tar"):
        (root / name).mkdir()
    for number, content in enumerate(files):
        (root / "images" / f"{number:03}.jpg").write_bytes(content)
    for part, rows in enumerate(np.array_split(np.arange(NUM_IMAGES), 3)):
        cells = {"jpg": [{"bytes": files[row], "path": None} for row in rows]}
        table = datasets.Dataset.from_dict(cells, features=datasets.Features({"jpg": datasets.Image()})).data.table
        parquet.write_table(table, root / "parquet" / f"train-{part:05}.parquet", row_group_size=5)
        write_tar(root / "tar" / f"train-{part:05}.tar", [(f"{row:03}.jpg", files[row]) for row in rows])
    return root


def read(data, layout, num_workers):
    return stacked(iterate_batches(data, layout, 0, UPDATES, num_workers, compact=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
@pytest.mark.parametrize("way", ["random access", "stream"])
def test_format_workers_and_processes_change_nothing(folders, way):
    """Every format with every number of workers and of processes, and each of their pairs with some format."""
    options = {"image_channels": 3, "random_flip": True, "in_memory_limit_mb": 0}
    if way == "stream":
        options |= {"streaming": True, "max_train_steps": 9}
        del options["in_memory_limit_mb"]
    seen = []
    for turn, name in enumerate(("images", "parquet", "tar")):
        data = load(folders / name, **options)
        expected = read(data, BatchLayout(BATCH), 0)
        seen.append(expected)
        for place, num_workers in enumerate((1, 2, 4)):
            processes = (1, 2, 4)[(place + turn) % 3]
            for rank, workers in [(rank, 0) for rank in range(processes)] + [(processes - 1, num_workers)]:
                layout = BatchLayout(BATCH // 2 // processes, 2, processes, rank)
                places = [number for part in layout.positions() for number in part]
                assert torch.equal(read(data, layout, workers), expected[:, places]), (name, processes, workers)
    if way == "random access":  # streams of other shards have other orders
        assert all(torch.equal(each, seen[0]) for each in seen)
    assert len(torch.unique(seen[0].flatten(0, 1).flatten(1), dim=0)) > NUM_IMAGES / 2
