"""What a model is worth: validation loss and distances."""
