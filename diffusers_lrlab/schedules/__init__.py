"""Learning-rate schedules and their registration with diffusers."""
