"""Mistakes that users make, and the error that each must end in; tests/mistakes/README.md is made from them."""

from tests.mistakes import checkpoints, differing, fsdp2, megatron, models, optimizers, settings, training
from tests.mistakes.case import Mistake, Theme

THEMES: tuple[Theme, ...] = (
    settings.THEME,
    models.THEME,
    models.SHARDED,
    optimizers.THEME,
    training.THEME,
    differing.THEME,
    checkpoints.THEME,
    fsdp2.THEME,
    megatron.THEME,
)


def find(title: str) -> tuple[Theme, Mistake]:
    """The mistake with a title, and its theme."""
    return next((theme, mistake) for theme in THEMES for mistake in theme.mistakes if mistake.title == title)
