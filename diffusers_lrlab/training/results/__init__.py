"""Results of a trained model for each kind of data: samples, plots, metrics."""
