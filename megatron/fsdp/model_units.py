"""Which classes of a model are its layers, as Hugging Face's models say."""

from torch import nn


def unit_classes(model: nn.Module) -> list[str]:
    """The names of a Hugging Face model's classes of transformer blocks, for ``fsdp_unit_modules``.

    They are the classes in ``_no_split_modules`` of the model and its submodules. Some models list classes that they
    lack; these are left out, since ``fully_shard`` raises an error for them.

    Args:
        model: The model.

    Returns:
        Names of classes that occur in the model, sorted. Empty if it lists none.
    """
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return sorted(names & {type(module).__name__ for module in model.modules()})
