"""A simulated CUDA device: CPU tensors compute at once, and only the order of kernels, waits and memory is simulated.

:func:`tests.simulated.device.simulated_device` is the entrance. What it shows is a statement about order and memory in
a model of CUDA. It does not show that anything runs on a GPU.
"""
