"""The check for the day that a GPU is at hand: are the kernels right, how fast are they, does the engine do its work?

`python -m scripts.gpu_check --out DIR` runs everything within eight minutes, each part in a process of its own, so that
a crash or a hang loses one figure and no more. Results are JSON; the last lines printed are a short table. Without
network. `--stand-in` runs every part on a CPU at tiny shapes: it says nothing about speed, but that the script works.
"""
