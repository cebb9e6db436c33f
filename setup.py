"""Says which packages the wheel holds; everything else is in pyproject.toml.

`megatron` is a namespace that megatron-core fills too: only `megatron.fsdp` is this project's, so the packages are
named here instead of being found from the root, and no `megatron/__init__.py` may exist.
"""

from setuptools import find_namespace_packages, setup

PACKAGES = ("megatron.fsdp", "megatron_fsdp")

setup(packages=find_namespace_packages(include=[*PACKAGES, *(f"{name}.*" for name in PACKAGES)]))
