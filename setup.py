"""Lists the packages of the wheel; everything else is in pyproject.toml.

`megatron` is a namespace that megatron-core uses too, and only `megatron.fsdp` belongs to this project. So the packages
are named here instead of being found from the root, and there must be no `megatron/__init__.py`.
"""

from setuptools import find_namespace_packages, setup

PACKAGES = ("megatron.fsdp", "megatron_fsdp")

setup(packages=find_namespace_packages(include=[*PACKAGES, *(f"{name}.*" for name in PACKAGES)]))
