"""
All code that touches the internals of diffusers and accelerate.

`registration` adds names to diffusers and transformers. `host/` reads the text of a third-party script and follows it while
it runs, `hooks/` changes what it does, and `hook_table` lists the hooks for the launcher.
"""
