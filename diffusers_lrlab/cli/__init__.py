"""The `lrlab` command: one file per family of subcommands."""
