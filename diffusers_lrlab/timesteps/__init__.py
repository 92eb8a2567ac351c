"""Which timesteps are trained when, and how strongly."""
