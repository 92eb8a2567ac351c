"""A generated set of labelled images as a folder that `load_dataset` and the Hub understand."""

from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.files import new_folder, write_text
from ..core.manifest import write_manifest
from ..data.image_sets import IMAGE_DATASETS, load_image_dataset
from .cards import fill
from .dataset_folder import size_category

_NUM_SHOWN = 40  # images of the plot
_NUM_GROUPS = 16


def export_image_dataset(
    name: str, folder: Path, n: int = 10_000, n_test: int = 1_000, seed: int = 42, resolution: int | None = None
) -> None:
    """
    Writes a generated set of images into a new folder, whole or not at all: parquet files, a card that says how it was made,
    a plot of some images.

    `n` and `n_test` are the images of the splits `train` and `test`; `n_test=0` leaves it out. `resolution` is that of
    [`load_image_dataset`].
    """
    entry = IMAGE_DATASETS[name]
    if "made" not in entry.traits:
        made = ", ".join(repr(each) for each, other in IMAGE_DATASETS.items() if "made" in other.traits)
        raise LabError(f"{name!r} cannot be exported: its images come from {entry.source}. Sets that can: {made}.")
    from ..training.plots.images import plot_samples

    sizes = {"train": n} | ({"test": n_test} if n_test else {})
    with new_folder(folder) as temporary:
        splits = {split: load_image_dataset(name, size, seed, split, resolution) for split, size in sizes.items()}  # type: ignore[arg-type]
        for split, dataset in splits.items():
            _write(dataset, temporary / "data" / f"{split}-00000-of-00001.parquet")
        some = [np.asarray(image) for image in splits["train"][:_NUM_SHOWN]["image"]]
        plot_samples(np.stack([image if image.ndim == 3 else image[..., None] for image in some]), temporary / "images.png")
        write_text(temporary / "README.md", _card(name, sizes, seed, splits["train"]))
        write_manifest(temporary)


def _write(dataset: Any, path: Path) -> None:
    """Without `to_parquet`'s progress bars, and with the columns' types, labels among them, in the schema."""
    from pyarrow import parquet

    path.parent.mkdir(exist_ok=True)
    table = dataset.data.table.replace_schema_metadata(dataset.features.arrow_schema.metadata)
    # A stream shuffles row groups, so there are several also of a small set.
    parquet.write_table(table, path, row_group_size=max(1, min(1000, -(-len(table) // _NUM_GROUPS))))


def _type_of(feature: Any) -> str:
    return feature.dtype if type(feature).__name__ == "Value" else type(feature).__name__


def _card(name: str, sizes: dict[str, int], seed: int, train: Any) -> str:
    from huggingface_hub import DatasetCardData

    entry = IMAGE_DATASETS[name]
    side = train[0]["image"].size[0]
    data = DatasetCardData(
        license="apache-2.0",
        pretty_name=f"{name}, {side}x{side} labelled images",
        task_categories=["unconditional-image-generation", "image-classification"],
        tags=["synthetic", "diffusion", "diffusers_lrlab"],
        size_categories=[size_category(sum(sizes.values()))],
        configs=[
            {
                "config_name": "default",
                "data_files": [{"split": split, "path": f"data/{split}-*.parquet"} for split in sizes],
            }
        ],
    )
    return fill(
        "image_dataset_card.md",
        data,
        title=name,
        side=side,
        description=entry.description,
        source=entry.source,
        licence=entry.facts["licence"],
        sizes=list(sizes.items()),
        columns=[(column, _type_of(feature)) for column, feature in train.features.items()],
        class_names=", ".join(entry.facts["class_names"]),
        seed=seed,
        command=f"lrlab data export {name} DIR --n {sizes['train']} --n_test {sizes.get('test', 0)} --seed {seed} "
        f"--resolution {side}",
    )
