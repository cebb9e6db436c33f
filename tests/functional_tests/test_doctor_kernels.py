"""Kernels that only a GPU has, as the doctor predicts them: 8-bit floats, and several operators in one."""

import pytest

from tests.functional_tests.test_doctor import WORDS, doctor

QUANTIZED = "--fp8-format hybrid --fp8-recipe tensorwise".split()
LARGE = "--hidden-size 4096 --ffn-hidden-size 16384 --num-attention-heads 32 --seq-length 4096"


def test_a_step_in_8_bits() -> None:
    """Linear layers compute twice as fast and keep half of the bytes, and stored weights need no casts."""
    words = [*WORDS, *LARGE.split(), "--max-position-embeddings", "4096", "--bf16", "--first-last-layers-bf16"]
    changes: list[list[str]] = [[], QUANTIZED, [*QUANTIZED, "--fp8-param-gather"]]
    found = [doctor("--gpu", "h100", *words, *change) for change in changes]
    plain, computed, stored = (each["step"] for each in found)
    compute = [each["step"]["seconds"] - sum(each["step"]["waits"].values()) for each in found]
    assert 0.95 * compute[0] > compute[1] > compute[2] > compute[0] / 2
    assert plain["peak"]["activations"] > computed["peak"]["activations"] == stored["peak"]["activations"]
    assert plain["communication"] == pytest.approx(computed["communication"], rel=1e-3)
    assert stored["communication"] < 0.9 * plain["communication"]
    # Of four layers, the first and the last stay in bf16.
    units = [[step["units"][f"module.decoder.layers.{n}"]["compute"] for n in range(4)] for step in (plain, computed)]
    first, *middle, last = (low / high for high, low in zip(*units, strict=True))
    assert first > 0.99 < last and max(middle) < 0.9
    kept = stored["peak"]["shards"] + stored["peak"]["optimizer"]
    assert kept == pytest.approx(found[2]["resting"], rel=0.02)


def test_a_step_with_the_optimizer_on_the_host() -> None:
    """A rank's shards are on the host, as the report counts it, and each step waits for copies and updates there."""
    words = [*WORDS, "--bf16", "--hidden-size", "1024", "--ffn-hidden-size", "4096"]
    offloaded = ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    here, half, there = (
        doctor("--gpu", "h100", *words, *more)
        for more in ([], [*offloaded, "--optimizer-offload-fraction", "0.5"], offloaded)
    )
    seconds = [each["step"]["seconds"] for each in (here, half, there)]
    kept = [each["step"]["peak"]["optimizer"] + each["step"]["peak"].get("shards", 0) for each in (here, half, there)]
    assert seconds == sorted(seconds) and seconds[0] < 0.8 * seconds[2]
    assert kept[0] > 1.2 * kept[1] > 12 * kept[2] and kept[1] == pytest.approx(half["resting"], rel=0.05)


def test_kernels_of_a_gpu_save_time() -> None:
    words = [*WORDS, *LARGE.split(), "--max-position-embeddings", "4096", "--bf16", "--position-embedding-type", "rope"]
    words += ["--transformer-impl", "local", "--attention-backend", "unfused", "--swiglu"]
    flags: list[list[str]] = [[], ["--no-rope-fusion"], ["--no-masked-softmax-fusion"]]
    one, *others = (doctor("--gpu", "h100", *words, *flag)["step"] for flag in flags)
    assert all(other["seconds"] > 1.005 * one["seconds"] for other in others)
    assert sum(others[1]["peak"].values()) > sum(one["peak"].values())
    apart = doctor("--gpu", "h100", *words, change="command.kernels.compiled = lambda: iter(())")["step"]
    assert apart["seconds"] > 1.005 * one["seconds"]
