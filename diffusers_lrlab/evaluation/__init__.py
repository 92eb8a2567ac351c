"""How good a model is: validation loss, distances, likelihood."""
