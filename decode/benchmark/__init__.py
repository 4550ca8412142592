"""Methods of decoding side by side: the parts of scripts/benchmark.py.

`prompts` chooses what is asked, `methods` runs each way of answering on one clock and one counter, `log` keeps what has
been measured so that a run may be cut and continued, `summary` makes figures of it and `figures` pictures.
"""
