"""Reads the settings of a model, from config.json or from Megatron's arguments, and collects unsupported ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.fsdp.convert.huggingface.model import Attention, Latent


@dataclass(frozen=True)
class Settings:
    """Settings of a model, and those of them that cannot be converted.

    Attributes:
        source: Where the settings are from, for messages.
        architecture: Hugging Face's ``model_type``.
        values: By name. None counts as missing.
        partial: Whether a setting may be missing.
        problems: Settings that cannot be converted, one message for each.
    """

    source: str
    architecture: str
    values: Mapping[str, Any]
    partial: bool
    problems: list[str] = field(default_factory=list)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting, or the default if it is missing."""
        value = self.values.get(name)
        return default if value is None else value

    def size(self, *names: str) -> int:
        """Return the first of these settings that is an integer. Versions of transformers differ in some names.

        Raises:
            ValueError: There is none.
        """
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        raise ValueError(f"{self.source}: expected an integer {' or '.join(names)}; got {self.values.get(names[0])!r}.")

    def expect(self, name: str, *allowed: Any) -> None:
        """Note a problem if a setting is not one of these values."""
        value = self.values.get(name)
        if value not in allowed and not (self.partial and value is None):
            self.problems.append(f"{name}: expected {' or '.join(map(repr, allowed))}; got {value!r}")

    def raise_problems(self, message: str) -> None:
        """Raise NotImplementedError with all problems, if there are any."""
        if self.problems:
            raise NotImplementedError("\n  ".join([f"{message}:", *self.problems]))


def latent_attention(settings: Settings, names: Mapping[str, str]) -> Attention:
    """Describe multi-latent attention.

    Args:
        settings: Of the model.
        names: The name of the setting for each field of ``Latent``.
    """
    heads = settings.size("num_attention_heads")
    # Only the query rank may be missing: then queries are not compressed.
    sizes = {field: settings.size(name) for field, name in names.items() if field != "query_rank"}
    latent = Latent(settings.get(names["query_rank"]), **sizes)
    return Attention(heads, heads, latent.plain + latent.rotary, norm=True, latent=latent)


def router_groups(
    settings: Settings, name: str, chosen: int, groups: int, chosen_groups: int | None
) -> tuple[int, int]:
    """The numbers of groups of experts and of groups that a token's experts are chosen from; 1 and 1 without limits.

    Groups are ranked by the scores of their best experts: two in transformers, and in Megatron as many as are chosen
    per group. Only where these numbers are equal do both choose the same experts.

    Args:
        settings: Of the model. They get a problem if both choose other experts.
        name: The setting for the number of experts per token.
        chosen: Its value.
        groups: From the settings.
        chosen_groups: From the settings; None or 0 if they have none.
    """
    if not chosen_groups or chosen_groups >= groups:
        return 1, 1
    if chosen // chosen_groups != 2:
        settings.problems.append(f"{name}: expected {2 * chosen_groups}, twice the chosen groups; got {chosen}")
    return groups, chosen_groups
