"""Each flag of Megatron that touches data parallelism trains as with Megatron's DDP, or is refused by name."""

from pathlib import Path

import pytest
import torch

from scripts import try_flags
from tests.launch import python
from tests.ranks import ROOT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo; Megatron runs on CUDA here")


@pytest.mark.parametrize(
    ("dest", "fragment", "state"),
    [
        ("clip_grad", "--clip-grad 0.5", "works"),
        pytest.param("fp8", try_flags.FP8, "off on a CPU", marks=pytest.mark.slow),
        pytest.param("ddp_num_buckets", "--ddp-num-buckets 2", "no effect", marks=pytest.mark.slow),
        ("use_sharp", "--use-sharp --sharp-enabled-group dp", "refused"),
        # Taken for a flag of FSDP alone, so that DDP runs without it.
        ("fsdp_lr", "--lr 5e-3", "DIFFERS"),
        ("fsdp_heads", "--num-attention-heads 5", "ERROR"),
    ],
)
def test_states(dest: str, fragment: str, state: str, tmp_path: Path) -> None:
    assert try_flags.try_flag("--flag", dest, fragment, str(tmp_path)).state == state


def test_a_refusal_must_name_the_flag() -> None:
    limit = next(limit for limit in try_flags.LIMITS if limit.setting.startswith("megatron_fsdp_main_params_dtype"))
    error = f"ValueError: {limit.setting}: {limit.reason} {limit.remedy}"
    flag = "--megatron-fsdp-main-params-dtype bf16"
    assert try_flags._refuses(error, "megatron_fsdp_main_params_dtype", flag)
    assert try_flags._refuses(error, "other", f"--other {flag}")
    assert not try_flags._refuses(error, "bf16", "--bf16")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_flag() -> None:
    table = ROOT / "out" / "flags.md"
    table.parent.mkdir(exist_ok=True)
    ended = python("scripts/try_flags.py", "--markdown", table, timeout=3500)
    assert ended.returncode == 0, table.read_text() + ended.stderr[-2000:]
