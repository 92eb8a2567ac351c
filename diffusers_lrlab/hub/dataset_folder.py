"""A generated set of points or of labelled images as a folder that `load_dataset` and the Hub understand."""

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


def export_dataset(
    name: str, folder: Path, n: int = 100_000, n_test: int = 10_000, seed: int = 42, resolution: int | None = None
) -> None:
    """
    Writes a toy dataset or a generated set of images into a new folder, whole or not at all: parquet files, a card, a plot.

    `n` and `n_test` are the rows of the splits `train` and `test`, which are independent draws; `n_test=0` leaves it out.
    `resolution` is that of [`load_image_dataset`].
    """
    from huggingface_hub import DatasetCardData
    from pyarrow import parquet

    is_image = name in IMAGE_DATASETS
    entry = IMAGE_DATASETS[name] if is_image else TOY_DATASETS[name]
    if is_image and "made" not in entry.traits:
        made = ", ".join(repr(each) for each, other in IMAGE_DATASETS.items() if "made" in other.traits)
        raise LabError(f"{name!r} cannot be exported: its images come from {entry.source}. Sets that can: {made}.")
    if not is_image:
        check_draw(name, n, seed)
        check_draw(name, n_test, seed, "n_test", least=0)

    def make(split: Any, size: int) -> Any:
        if is_image:
            return load_image_dataset(name, size, seed, split, resolution)
        return load_toy_dataset(name, size, seed, split)

    with new_folder(folder) as temporary:
        (temporary / "data").mkdir()
        splits = {split: make(split, size) for split, size in (("train", n), ("test", n_test)) if size}
        for split, dataset in splits.items():
            # Not `to_parquet`, which writes progress bars into logs. The schema has the types of columns, such as labels.
            table = dataset.data.table.replace_schema_metadata(dataset.features.arrow_schema.metadata)
            rows = max(1, min(1000, -(-len(table) // _NUM_GROUPS))) if is_image else None
            parquet.write_table(table, temporary / "data" / f"{split}-00000-of-00001.parquet", row_group_size=rows)
        template, about, values = (_about_images if is_image else _about_points)(entry, splits, temporary)
        sizes = {split: len(rows) for split, rows in splits.items()}
        files = [{"split": split, "path": f"data/{split}-*.parquet"} for split in sizes]
        metadata = DatasetCardData(
            **about,
            size_categories=[_size_category(sum(sizes.values()))],
            configs=[{"config_name": "default", "data_files": files}],
        )
        command = f"lrlab data export {name} DIR --n {n} --n_test {n_test} --seed {seed}"
        command += f" --resolution {values['side']}" if is_image else ""
        values |= {"description": entry.description, "source": entry.source, "sizes": [*sizes.items()], "seed": seed}
        write_text(temporary / "README.md", fill(template, metadata, title=name, command=command, **values))
        write_manifest(temporary)


def _about_points(entry: Entry, splits: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Template, metadata and values of the card of a set of points; draws its plot."""
    from ..training.plots import plot_splits

    plot_splits({split: rows.with_format("numpy")["x"][:] for split, rows in splits.items()}, folder / "points.png")
    metadata = {
        # The shapes are from a package under the MIT licence; the rest is made by our own formulas.
        "license": "mit" if "shape" in entry.traits else "apache-2.0",
        "pretty_name": f"{entry.name}, a 2-D toy dataset",
        "tags": ["toy", "2d", "points", "diffusion", "diffusers_lrlab"],
    }
    return "dataset_card.md", metadata, {"has_density": toy_log_prob(entry.name) is not None}


def _about_images(entry: Entry, splits: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """[`_about_points`] for images."""
    from ..training.plots import plot_samples

    rows = splits["train"]
    some = [np.asarray(image) for image in rows[:_NUM_SHOWN]["image"]]
    plot_samples(np.stack([image if image.ndim == 3 else image[..., None] for image in some]), folder / "images.png")
    side = rows[0]["image"].size[0]
    metadata = {
        "license": "apache-2.0",
        "pretty_name": f"{entry.name}, {side}x{side} labelled images",
        "task_categories": ["unconditional-image-generation", "image-classification"],
        "tags": ["synthetic", "diffusion", "diffusers_lrlab"],
    }
    types = {
        name: each.dtype if type(each).__name__ == "Value" else type(each).__name__ for name, each in rows.features.items()
    }
    values = {"side": side, "licence": entry.facts["licence"], "columns": [*types.items()]}
    return "image_dataset_card.md", metadata, values | {"class_names": ", ".join(entry.facts["class_names"])}


def _size_category(num_rows: int) -> str:
    """The Hub's category of a number of rows, one for each power of ten."""
    words = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B")
    return words[max(0, len(str(num_rows)) - 3)]
