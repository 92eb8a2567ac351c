"""The learning-rate finder: short runs with a rising rate, and rules that read a learning rate off their losses."""
