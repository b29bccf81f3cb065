"""The compile gate: every GPU kernel and whole step programs through XLA's CUDA pipeline, on a machine without a GPU.

XLA compiles for a GPU that it is only told about (`target`), ptxas included. What comes out is read (`reading`) and
judged (`judging`): registers, spills, shared memory, tensor-core instructions, copies of the KV cache. It says nothing
about speed or correctness. `providers` names what is compiled; `python -m scripts.gpu_gate` runs it all.
"""
