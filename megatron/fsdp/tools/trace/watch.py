"""Traces one step of an unmodified training script, from one optimizer step to the next."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.fsdp.runtime.engine import Engine, engines_of
from megatron.fsdp.tools.trace.recorder import Replacements
from megatron.fsdp.tools.trace.timeline import Timeline


class StepWatcher:
    """Counts steps of the first optimizer of a sharded model, and traces one iteration.

    An iteration lasts from the end of one ``optimizer.step`` call to the end of the next: reading data, all
    micro-batches, and the update.

    Args:
        trace: Creates the context that traces a model.
        passes: Number of steps before the traced one; at least 2, because the first steps allocate memory and record
            the plan.
        finished: Called on every rank with the timeline.

    Raises:
        ValueError: ``passes`` is below 2.
    """

    def __init__(
        self,
        trace: Callable[[Engine], AbstractContextManager[Timeline]],
        passes: int,
        finished: Callable[[Timeline], None],
    ) -> None:
        if passes < 2:
            raise ValueError(f"expected at least 2 steps before the traced one; got {passes}")
        self._trace = trace
        self._remaining = passes
        self._finished = finished
        self._context: AbstractContextManager[Timeline] | None = None
        self._timeline: Timeline | None = None
        self._replacements: Replacements | None = None
        self._hook = register_optimizer_step_post_hook(self._after_first)

    @property
    def done(self) -> bool:
        """Whether a step has been traced."""
        return self._timeline is not None and self._context is None

    def _after_first(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        """Step post-hook of all optimizers: replace the ``step`` of the first one that belongs to a sharded model.

        The recording is not started and stopped in hooks, because torch iterates over the hooks while they run, and the
        recorder adds and removes some.
        """
        engines = engines_of(p for group in optimizer.param_groups for p in group["params"])
        if self._replacements is None and engines:
            self._remaining -= 1
            self._replacements = Replacements()
            self._replacements.replace(optimizer, "step", functools.partial(self._step, engines[0]))

    def _step(self, engine: Engine, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if self._context is not None:
            self._finish(self._context)
        elif not self.done:
            self._remaining -= 1
            if self._remaining == 0:
                self._context = self._trace(engine)
                self._timeline = self._context.__enter__()
        return result

    def _finish(self, context: AbstractContextManager[Timeline]) -> None:
        self._context = None
        self._hook.remove()
        if self._replacements is not None:
            self._replacements.undo()
        context.__exit__(None, None, None)
        if self._timeline is not None:
            self._finished(self._timeline)
