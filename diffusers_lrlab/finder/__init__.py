"""The learning-rate finder: a short run in which the rate rises, and what its loss says of the rate to train with."""
