"""Before training: checks of the data, the settings and the model, and a forecast of time, memory and disk space."""
