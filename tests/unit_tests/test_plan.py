"""The plan command: its choices, their order, and a comparison with a trace."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron.fsdp.tools.devices import GIB
from megatron.fsdp.tools.predict import Topology
from megatron.fsdp.tools.predict.plan import Choice, Cluster, audit, candidates, cluster_of, main, ordered, plan, table
from megatron.fsdp.tools.trace.timeline import Timeline
from tests.models import Block, TinyModel

H100 = cluster_of("h100")


def _cluster(memory: int) -> Cluster:
    return dataclasses.replace(H100, per_host=2, device=dataclasses.replace(H100.device, memory=memory))


def _model() -> nn.Module:
    return TinyModel(width=64, depth=2, vocabulary=32)


def test_choices_their_order_and_an_audit(tmp_path: Path) -> None:
    seen: list[Choice] = []
    found = plan(
        _model,
        lambda: torch.zeros(2, 8, dtype=torch.int64),
        units=[Block],
        ranks=4,
        cluster=_cluster(80 * GIB),
        on_choice=seen.append,
        loss=lambda model, tokens: model(tokens).sum(),
    )
    assert len(seen) == 6 and [c.name for c in seen][-2:] == ["HSDP 2 x 2", "hybrid FSDP 2 x 2"]
    assert [c.prediction.step_seconds for c in found] == sorted(c.prediction.step_seconds for c in seen)
    assert all(name in table(found) for name in ("optim_grads_params", "HSDP 2 x 2", "free"))
    small = ordered([dataclasses.replace(c, capacity=1) for c in seen])
    assert [c.memory for c in small] == sorted(c.memory for c in seen) and "does not fit by" in small[0].verdict
    Timeline([found[0].prediction.trace]).save(tmp_path / "trace.json")
    for line in audit(found[0], tmp_path / "trace.json").splitlines()[1:]:
        cells = line.split("  ")[1:]
        assert all(abs(float(a) - float(b)) <= 0.011 for a, _, b in (cell.split() for cell in cells)), line


def test_links_follow_the_hosts() -> None:
    inner, outer = H100.links(Topology(8, 8))
    assert (inner.bandwidth, outer.bandwidth) == (H100.inside, H100.between)
    crossing, _ = H100.links(Topology(64))
    assert crossing.bandwidth == 8 * H100.between and crossing.ranks_per_hop == 8
    assert [axes.inner for *_, axes in candidates(64, 8)] == [64, 64, 64, 64, 8, 8]


def test_an_unknown_gpu_lists_the_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps({}))
    monkeypatch.setattr(sys, "argv", ["plan", "--model", f"{__name__}:_model", "--units", "Block", "--gpu", "h1000"])
    with pytest.raises(SystemExit):
        main()
    assert "h100, h100-nvl" in capsys.readouterr().err
