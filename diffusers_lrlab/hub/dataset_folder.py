"""A generated set of points or of labelled images as a folder that `load_dataset` and the Hub understand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.files import new_folder, write_text
from ..core.manifest import write_manifest
from ..core.registry import Entry
from ..data.image_sets import IMAGE_DATASETS, load_image_dataset
from ..data.toy2d import TOY_DATASETS, check_draw, load_toy_dataset, toy_log_prob
from .card_facts import fill

_NUM_SHOWN = 40  # images of the plot
_NUM_GROUPS = 16  # of rows of images, which a stream shuffles


def export_toy_dataset(name: str, folder: Path, n: int = 100_000, n_test: int = 10_000, seed: int = 42) -> None:
    """
    Writes a toy dataset into a new folder, whole or not at all: parquet files, a card, a plot.

    `n` and `n_test` are the points of the splits `train` and `test`, which are independent draws; `n_test=0` leaves it out.
    """
    from ..training.plots import plot_splits

    check_draw(name, n, seed)
    check_draw(name, n_test, seed, "n_test", least=0)
    entry = TOY_DATASETS[name]
    with _written(folder, n, n_test, lambda split, size: load_toy_dataset(name, size, seed, split)) as (temporary, splits):  # type: ignore[arg-type]
        plot_splits({split: rows.with_format("numpy")["x"][:] for split, rows in splits.items()}, temporary / "points.png")
        metadata = {
            # The shapes are from a package under the MIT licence; the rest is made by our own formulas.
            "license": "mit" if "shape" in entry.traits else "apache-2.0",
            "pretty_name": f"{name}, a 2-D toy dataset",
            "tags": ["toy", "2d", "points", "diffusion", "diffusers_lrlab"],
        }
        has_density = toy_log_prob(name) is not None
        _write_card(temporary, "dataset_card.md", entry, splits, seed, metadata, has_density=has_density)


def export_image_dataset(
    name: str, folder: Path, n: int = 10_000, n_test: int = 1_000, seed: int = 42, resolution: int | None = None
) -> None:
    """
    [`export_toy_dataset`] for a generated set of images; `resolution` is that of [`load_image_dataset`].
    """
    from ..training.plots import plot_samples

    entry = IMAGE_DATASETS[name]
    if "made" not in entry.traits:
        made = ", ".join(repr(each) for each, other in IMAGE_DATASETS.items() if "made" in other.traits)
        raise LabError(f"{name!r} cannot be exported: its images come from {entry.source}. Sets that can: {made}.")

    def make(split: str, size: int) -> Any:
        return load_image_dataset(name, size, seed, split, resolution)  # type: ignore[arg-type]

    with _written(folder, n, n_test, make, _NUM_GROUPS) as (temporary, splits):
        some = [np.asarray(image) for image in splits["train"][:_NUM_SHOWN]["image"]]
        plot_samples(np.stack([image if image.ndim == 3 else image[..., None] for image in some]), temporary / "images.png")
        side, features = splits["train"][0]["image"].size[0], splits["train"].features.items()
        metadata = {
            "license": "apache-2.0",
            "pretty_name": f"{name}, {side}x{side} labelled images",
            "task_categories": ["unconditional-image-generation", "image-classification"],
            "tags": ["synthetic", "diffusion", "diffusers_lrlab"],
        }
        _write_card(
            *(temporary, "image_dataset_card.md", entry, splits, seed, metadata, f" --resolution {side}"),
            side=side,
            licence=entry.facts["licence"],
            columns=[
                (name, each.dtype if type(each).__name__ == "Value" else type(each).__name__) for name, each in features
            ],
            class_names=", ".join(entry.facts["class_names"]),
        )


@contextmanager
def _written(
    folder: Path, n: int, n_test: int, make: Callable[[str, int], Any], num_groups: int | None = None
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The splits in parquet files of a new folder, to which the caller adds card and plot."""
    from pyarrow import parquet

    with new_folder(folder) as temporary:
        (temporary / "data").mkdir()
        splits = {split: make(split, size) for split, size in (("train", n), ("test", n_test)) if size}
        for split, dataset in splits.items():
            # Not `to_parquet`, which writes progress bars into logs. The schema has the types of columns, such as labels.
            table = dataset.data.table.replace_schema_metadata(dataset.features.arrow_schema.metadata)
            rows = num_groups and max(1, min(1000, -(-len(table) // num_groups)))
            parquet.write_table(table, temporary / "data" / f"{split}-00000-of-00001.parquet", row_group_size=rows)
        yield temporary, splits
        write_manifest(temporary)


def _write_card(
    folder: Path,
    template: str,
    entry: Entry,
    splits: dict[str, Any],
    seed: int,
    metadata: Any,
    options: str = "",
    **more: Any,
) -> None:
    from huggingface_hub import DatasetCardData

    sizes = {split: len(rows) for split, rows in splits.items()}
    files = [{"split": split, "path": f"data/{split}-*.parquet"} for split in sizes]
    data = DatasetCardData(
        **metadata,
        size_categories=[_size_category(sum(sizes.values()))],
        configs=[{"config_name": "default", "data_files": files}],
    )
    numbers = f"--n {sizes['train']} --n_test {sizes.get('test', 0)} --seed {seed}"
    values = {"title": entry.name, "description": entry.description, "source": entry.source, "seed": seed} | more
    command = f"lrlab data export {entry.name} DIR {numbers}{options}"
    write_text(folder / "README.md", fill(template, data, sizes=list(sizes.items()), command=command, **values))


def _size_category(num_rows: int) -> str:
    """The Hub's category of a number of rows, one for each power of ten."""
    words = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B")
    return words[max(0, len(str(num_rows)) - 3)]
