"""Measures a rank's CPU time in each part of a step. Called through ``benchmarks.worker``."""

import time

from benchmarks import training
from benchmarks.model import batch, loss_of
from benchmarks.training import PARTS


def turn(tokens: int, steps: int, warm_up: int = 3) -> dict[str, float]:
    """Mean CPU time of all threads per step, in microseconds, by parts of the step."""
    for _ in range(warm_up):
        training.train_step(tokens)
    mine = training.running()
    data = batch(mine.job.shape.vocabulary, tokens, mine.steps, mine.rank)
    spent = dict.fromkeys(PARTS, 0.0)
    clock = time.process_time
    for _ in range(steps):
        began = clock()
        loss = loss_of(mine.trainable.model, data)
        forwarded = clock()
        mine.trainable.backward(loss)
        backwarded = clock()
        mine.trainable.step()
        ended = clock()
        for part, seconds in zip(PARTS, (forwarded - began, backwarded - forwarded, ended - backwarded), strict=True):
            spent[part] += seconds
    return {part: 1e6 * seconds / steps for part, seconds in spent.items()}
