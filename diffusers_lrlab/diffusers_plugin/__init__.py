"""
All code that touches the internals of diffusers and accelerate.

`registration/` adds names to diffusers. `script/` reads the text of a third-party script, `host/` follows it while it runs,
and `hooks/` changes what it does; `hook_table` lists the hooks for the launcher.
"""
