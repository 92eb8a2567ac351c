"""Conventions of model classes: their name in pipelines, their arguments, and how they take class labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Architecture:
    """The conventions of a model class. These are the conventions of UNets, MLPs and third-party classes."""

    component: str | None = None  # its name in pipelines; `None` for that of the kind of data
    pipeline: str | None = None  # "module:class" of this package's pipeline of it; `None` for that of the kind of data
    # The label that stands for "no label", and so the most classes; `None` for the label after the last class.
    null_label: int | None = None

    def of_data(self, of_data: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that the data decide, by the names that the class gives them."""
        return dict(of_data)

    def sizes(self, given: Mapping[str, Any], of_data: Mapping[str, Any], num_images: int | None) -> dict[str, Any]:
        """
        Arguments of the class from the parameters of its row, for data with these arguments and this number of training
        images, `None` for a stream. Raises a `LabError` for parameters that exclude each other or do not fit the data.
        """
        return dict(given)

    def check_start(self, arguments: Mapping[str, Any], model: str) -> None:
        """Raises a `LabError` if weights to start from are those of a model that cannot be trained."""

    def prepared(self, model: Any) -> Any:
        """A new model, ready to be trained."""
        return model
