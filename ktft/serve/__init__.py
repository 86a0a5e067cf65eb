"""`ktft serve`: an engine of another project serves a model whose routed experts ktft computes.

`runtime` is what any engine needs, `front` the process that starts one and the door before its HTTP application. Each
engine is a folder, a row of `engines.py` and, to the rest, what `engine.py` says.
"""
