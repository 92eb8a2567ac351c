"""A toy dataset as a folder that `load_dataset` and the Hub understand."""

from pathlib import Path

from ..core.files import new_folder, write_text
from ..core.manifest import write_manifest
from ..data.toy2d import check_draw, load_toy_dataset, toy_log_prob
from ..data.toy2d_entries import TOY_DATASETS
from .cards import fill


def export_toy_dataset(name: str, folder: Path, n: int = 100_000, n_test: int = 10_000, seed: int = 42) -> None:
    """
    Writes a toy dataset into a new folder, whole or not at all: parquet files, a card, a plot.

    `n` and `n_test` are the points of the splits `train` and `test`, which are independent draws; `n_test=0` leaves it out.
    """
    check_draw(name, n, seed)
    check_draw(name, n_test, seed, "n_test", least=0)
    from pyarrow import parquet

    from ..training.plots.points import plot_splits

    sizes = {"train": n} | ({"test": n_test} if n_test else {})
    with new_folder(folder) as temporary:
        splits = {split: load_toy_dataset(name, size, seed, split) for split, size in sizes.items()}  # type: ignore[arg-type]
        for split, dataset in splits.items():
            path = temporary / "data" / f"{split}-00000-of-00001.parquet"
            path.parent.mkdir(exist_ok=True)
            # Not `to_parquet`, which writes progress bars into logs.
            parquet.write_table(dataset.data.table, path)
        points = {split: dataset.with_format("numpy")["x"][:] for split, dataset in splits.items()}
        plot_splits(points, temporary / "points.png")
        write_text(temporary / "README.md", _card(name, sizes, seed))
        write_manifest(temporary)


def _card(name: str, sizes: dict[str, int], seed: int) -> str:
    from huggingface_hub import DatasetCardData

    entry = TOY_DATASETS[name]
    files = [{"split": split, "path": f"data/{split}-*.parquet"} for split in sizes]
    data = DatasetCardData(
        # The shapes are from a package under the MIT licence; the rest is made by our own formulas.
        license="mit" if "shape" in entry.traits else "apache-2.0",
        pretty_name=f"{name}, a 2-D toy dataset",
        tags=["toy", "2d", "points", "diffusion", "diffusers_lrlab"],
        size_categories=[size_category(sum(sizes.values()))],
        configs=[{"config_name": "default", "data_files": files}],
    )
    options = f"--n {sizes['train']} --n_test {sizes.get('test', 0)} --seed {seed}"
    return fill(
        "dataset_card.md",
        data,
        title=name,
        description=entry.description,
        source=entry.source,
        sizes=list(sizes.items()),
        seed=seed,
        has_density=toy_log_prob(name) is not None,
        command=f"lrlab data export {name} DIR {options}",
    )


def size_category(num_rows: int) -> str:
    """The Hub's category of a number of rows, one for each power of ten."""
    words = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B")
    return words[max(0, len(str(num_rows)) - 3)]
