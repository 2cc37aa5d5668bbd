"""The layer inside other libraries. Each adapter is a module of its own and needs its library installed:

transformers     `accelerate` a loaded Nemotron-H model, and load ModelOpt checkpoints
"""
