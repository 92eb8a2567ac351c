"""All metrics: those that validation logs, those of images and those of points, in this order."""

from . import image_metrics, point_metrics
from .registry import METRICS, better_of, metric_label, metrics_table, register_metric, word_for

__all__ = [
    "METRICS",
    "better_of",
    "image_metrics",
    "metric_label",
    "metrics_table",
    "point_metrics",
    "register_metric",
    "word_for",
]
