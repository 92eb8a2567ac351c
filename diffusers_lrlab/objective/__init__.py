"""Noise process, target, loss and noise. No other package knows which objectives there are."""
