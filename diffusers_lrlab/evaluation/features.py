"""Features of images from your own functions, each with a Fréchet distance."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.registered import Unusable, call_registered, real_values
from ..core.signatures import checked
from .frechet import frechet_distance
from .registry import register_metric


@checked
def register_features(name: str, *, description: str, source: str) -> Callable[[Any], Any]:
    """
    A decorator that registers features of images, and with them the metric `frechet_NAME`.

    ```python
    @register_features("colours", description="mean colours", source="own")
    def colours(images):
        return images.mean(axis=(1, 2))
    ```

    The metric is the Fréchet distance between features of samples and of as many training images, see [`frechet_distance`].
    Beside it stands the distance of held-out images in place of samples.

    Args:
        name (`str`): The metric is `frechet_NAME`.
        description (`str`): What the features are, in a few words.
        source (`str`): The paper or model that they come from.

    The function gets images `(num, height, width, channels)` in [0, 1], as float32, all of a set at once, and returns
    finite numbers `(num, dimension)`, as an array or a tensor.
    """

    def decorator(function: Any) -> Any:
        def distance(real: np.ndarray, generated: np.ndarray) -> float:
            of_sets = (
                call_registered("features", name, function, _features, "", (images,), {}) for images in (real, generated)
            )
            return frechet_distance(*of_sets)

        title = f"Fréchet distance to training images by {description}"
        register_metric(f"frechet_{name}", description=title, source=source, facts={"form": "images"})(distance)
        return function

    return decorator


def _features(value: Any, images: np.ndarray) -> np.ndarray:
    wanted = f"finite numbers of shape ({len(images)}, dimension)"
    shape = tuple(getattr(value, "shape", None) or np.shape(value))
    features = np.asarray(real_values(value, wanted, (len(images), shape[1] if len(shape) == 2 else 1)), dtype=np.float64)
    if not np.isfinite(features).all():
        raise Unusable(f"must return {wanted}, and some are not finite")
    return features
