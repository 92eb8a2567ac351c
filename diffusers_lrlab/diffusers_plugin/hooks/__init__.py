"""The hooks of the launcher, a file each; rows of `hook_table.HOOKS` name them."""
