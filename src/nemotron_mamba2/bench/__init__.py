"""Measurements of what the package runs, with the check of every kernel in the same run.

`nemotron-mamba2 bench` prints them. `timing` measures, `records` says what a figure stands for, `layer` times one
Mamba-2 layer in steps of decode and verify, `peers` runs the same layer on other people's kernels, `plot` draws.
"""
