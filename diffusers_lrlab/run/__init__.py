"""A whole run, from a configuration to a finished folder."""
