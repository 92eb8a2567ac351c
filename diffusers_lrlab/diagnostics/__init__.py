"""What a run's log says by noise level, by gradient and of the learning rate."""
