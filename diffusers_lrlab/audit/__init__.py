"""Audit of the learning rate that a training program really uses: `lrlab audit`.

`startup/` is put on the program's PYTHONPATH and loads `recorder/`, which hooks torch in the program's own processes and
writes a line per update. Both need nothing but torch, so that the program's environment need not contain this package. The
other files read these lines after the program has ended.
"""
