"""PyTorch Lightning's Trainer with MegatronFSDPStrategy trains, saves and resumes as with its own DDP."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from megatron_fsdp import MegatronFSDP
from tests.ranks import RankPool, on_ranks

pytest.importorskip("lightning")

SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "clipping of values": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-true": {"precision": "bf16-true"},
}


def _compare(folder: Path, settings: dict[str, Any]) -> None:
    from tests import lightning_models as m

    _, expected = m.fit("ddp", 2, folder / "ddp", **settings)
    with patch.object(MegatronFSDP, "no_sync", autospec=True, side_effect=MegatronFSDP.no_sync) as no_sync:
        run, net = m.fit(m.sharded(), 2, folder / "fsdp", **settings)
    assert no_sync.call_count == 12 - run.global_step, "all micro-batches of a step but the last"
    tolerance = 1e-2 if settings.get("precision") else 1e-5
    assert len(net.losses) == 12 and sum(net.losses[6:]) < sum(net.losses[:6])
    torch.testing.assert_close(net.losses, expected.losses, rtol=tolerance, atol=tolerance)
    for name, value in m.full(net.state_dict()).items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=tolerance, atol=tolerance, msg=name)
    assert run.callback_metrics["val"] < 1


@pytest.mark.parametrize("settings", SETTINGS)
def test_trains_as_with_ddp(ranks: RankPool, tmp_path: Path, settings: str) -> None:
    ranks.run(2, _compare, tmp_path, SETTINGS[settings])


@on_ranks(2)
@pytest.mark.parametrize("zero", [1, 3])
def test_manual_optimization_of_two_networks(tmp_path: Path, zero: int) -> None:
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy

    from tests import lightning_models as m

    class Networks(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(5, m.WIDTH), m.Block(), nn.Linear(m.WIDTH, 5))
            self.discriminators = nn.ModuleList([nn.Linear(5, 1)])
            self.losses: list[float] = []

        def configure_optimizers(self) -> Any:
            generator = torch.optim.AdamW(self.generator.parameters(), lr=1e-2, eps=1e-5)
            return generator, torch.optim.SGD(self.discriminators.parameters(), 0.1)

        def training_step(self, batch: Any, index: int) -> None:
            for number, optimizer in enumerate(self.optimizers()):
                self.toggle_optimizer(optimizer)
                made = self.generator(batch[0])
                loss = (self.discriminators[0](made.detach() if number else made) - number).pow(2).mean()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.1, "norm")
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
                self.losses.append(loss.item())

    results = []
    for strategy in (DDPStrategy(find_unused_parameters=True), m.sharded(zero_dp_strategy=zero)):
        net = Networks()
        m.trainer(strategy, 2, tmp_path).fit(net, m.loader(2, 16))
        results.append((net.losses, m.full(net.state_dict())))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def _save(folder: Path, full: bool) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    from tests import lightning_models as m

    run, net = m.fit(m.sharded(save_distributed_checkpoint=not full), 2, folder, accumulate_grad_batches=2)
    assert (folder / "epoch=0.ckpt").is_file() == full
    return net.losses, m.full(net.state_dict()), _moments(run)


def _moments(run: Any) -> dict[str, torch.Tensor]:
    from tests import lightning_models as m

    state = run.optimizers[0].state_dict()["state"]
    return {f"{number}.{n}": v for number, each in state.items() for n, v in m.full(each).items()}


def _resume(folder: Path, path: Path, full: bool) -> tuple[list[float], dict[str, torch.Tensor], int, list[float]]:
    from tests import lightning_models as m

    strategy = m.sharded(save_distributed_checkpoint=not full)
    run, net = m.fit(strategy, 2, folder, path, accumulate_grad_batches=2)
    return net.losses, m.full(net.state_dict()), run.global_step, run.lr_scheduler_configs[0].scheduler.get_last_lr()


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_resumes_in_a_new_process_bit_for_bit(ranks: RankPool, tmp_path: Path, full: bool) -> None:
    straight = ranks.run(2, _save, tmp_path, full)
    ranks.close()  # the next run has new processes
    resumed = ranks.run(2, _resume, tmp_path / "resumed", tmp_path / "epoch=0.ckpt", full)
    for (losses, weights, _), (later, weights_again, steps, rates) in zip(straight, resumed, strict=True):
        assert later == losses[6:]
        assert steps == 6 and rates == [0.0025]
        assert all(torch.equal(weights_again[name], value) for name, value in weights.items())
    if not full:
        ranks.run(3, _load_only, tmp_path / "three", tmp_path / "epoch=1.ckpt", 3, *straight[0][1:])
        ranks.run(1, _load_only, tmp_path / "one", tmp_path / "epoch=1.ckpt", 1, *straight[0][1:])


def _load_only(folder: Path, path: Path, ranks: int, weights: dict, moments: dict) -> None:
    from tests import lightning_models as m

    # The checkpoint is that of the end of training: everything is loaded, and no step follows.
    run, net = m.fit(m.sharded(), ranks, folder, path, accumulate_grad_batches=2)
    assert not net.losses and run.global_step == 6
    loaded = m.full(net.state_dict())
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    state = _moments(run)
    assert state.keys() == moments.keys() and all(torch.equal(state[name], value) for name, value in moments.items())


@on_ranks(2)
def test_a_save_that_fails_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    from megatron.fsdp.integrations import lightning_strategy
    from tests import lightning_models as m

    run, _ = m.fit(m.sharded(), 2, tmp_path)
    path = tmp_path / "epoch=1.ckpt"
    files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning_strategy.dcp, "save", Mock(side_effect=OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            run.save_checkpoint(path)
    assert len(files) > 2 and all(file.read_bytes() == content for file, content in files.items())
    dist.barrier()
    run.save_checkpoint(path)
    run.save_checkpoint(path)
    assert sorted(entry.name for entry in tmp_path.iterdir() if "ckpt" in entry.name) == [
        "epoch=0.ckpt",
        "epoch=1.ckpt",
    ]
    (tmp_path / "mine").mkdir(exist_ok=True)
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(ValueError, match="earlier checkpoint"):
        run.save_checkpoint(tmp_path / "mine")


@on_ranks(2)
def test_a_file_with_full_tensors_goes_to_and_from_ddp(tmp_path: Path) -> None:
    from tests import lightning_models as m

    run, net = m.fit(m.sharded(save_distributed_checkpoint=False), 2, tmp_path)
    path = tmp_path / "epoch=0.ckpt"
    # A plain model, and Lightning's own DDP, take the file.
    loaded = m.Net.load_from_checkpoint(tmp_path / "epoch=1.ckpt")
    assert loaded.hparams.lr == 1e-2
    for name, value in m.full(net.state_dict()).items():
        assert torch.equal(value, loaded.state_dict()[name])
    _, by_ddp = m.fit("ddp", 2, tmp_path / "ddp", path)
    torch.testing.assert_close(by_ddp.losses, net.losses[6:], rtol=1e-5, atol=1e-5)
    # The other way round: a sharded model takes DDP's file.
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    m.fit("ddp", 2, tmp_path / "from", max_epochs=1)
    _, by_fsdp = m.fit(m.sharded(), 2, tmp_path / "to", tmp_path / "from" / "epoch=0.ckpt")
    torch.testing.assert_close(by_fsdp.losses, net.losses[6:], rtol=1e-5, atol=1e-5)
    with pytest.raises(KeyError, match="contains only the model"):
        m.fit(m.sharded(), 2, tmp_path / "none", tmp_path / "weights.ckpt")


@on_ranks(2)
def test_fit_twice(tmp_path: Path) -> None:
    from tests import lightning_models as m

    losses = []
    for strategy in ("ddp", m.sharded(zero_dp_strategy=1), m.sharded()):
        run, net = m.fit(strategy, 2, tmp_path, max_epochs=1)
        run.fit_loop.max_epochs = 2
        run.fit(net, m.loader(2))
        # Another Trainer trains the same model.
        m.trainer(m.sharded() if strategy != "ddp" else "ddp", 2, tmp_path, max_epochs=1).fit(net, m.loader(2))
        losses.append(net.losses)
    assert len(losses[0]) == 18
    torch.testing.assert_close(losses[1:], losses[:1] * 2, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_validate_test_and_predict_alone(tmp_path: Path) -> None:
    from tests import lightning_models as m

    run, net = m.fit(m.sharded(), 2, tmp_path)
    logged = run.validate(net, m.loader(2, 16), verbose=False)
    path = tmp_path / "epoch=1.ckpt"
    for full in (False, True):
        run.strategy._save_distributed_checkpoint = not full
        run.save_checkpoint(tmp_path / f"weights {full}", weights_only=True)
    predictions = run.predict(net, m.loader(2, 16))
    for checkpoint in (path, tmp_path / "weights False", tmp_path / "weights True"):
        other, fresh = m.trainer(m.sharded(), 2, tmp_path / "new"), m.Net()
        assert other.validate(fresh, m.loader(2, 16), checkpoint, verbose=False) == logged
        assert other.test(fresh, m.loader(2, 16), checkpoint, verbose=False) == logged
        for one, two in zip(other.predict(fresh, m.loader(2, 16), ckpt_path=checkpoint), predictions, strict=True):
            assert torch.equal(one, two)
    assert run.strategy.broadcast(run.global_rank, 1) == 1
    assert run.strategy.reduce(torch.tensor(float(run.global_rank)), reduce_op="sum") == 1


@on_ranks(2)
def test_weight_averaging(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    from tests import lightning_models as m

    results = []
    for strategy, name in (("ddp", "ddp"), (m.sharded(zero_dp_strategy=1), "1"), (m.sharded(), "3")):
        run, net = m.fit(strategy, 2, tmp_path / name, callbacks=[EMAWeightAveraging(decay=0.5)])
        results.append((net.losses, run.callback_metrics["val"].item(), m.full(net.state_dict())))
    expected, *others = results
    for result in others:
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    _, net = m.fit(
        m.sharded(), 2, tmp_path / "resumed", tmp_path / "3" / "epoch=0.ckpt", callbacks=[EMAWeightAveraging(decay=0.5)]
    )
    assert net.losses == results[-1][0][6:]
    for name, value in m.full(net.state_dict()).items():
        assert torch.equal(value, results[-1][2][name]), name


@on_ranks(2)
def test_layers_made_in_configure_model_on_the_meta_device(tmp_path: Path) -> None:
    from tests import lightning_models as m

    class Deferred(m.Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = None

        def configure_model(self) -> None:
            if self.blocks is None:
                with torch.device("meta"):
                    self.blocks = nn.Sequential(m.Block(), m.Block())

    net = Deferred()
    m.trainer(m.sharded(), 2, tmp_path).fit(net, m.loader(2))
    assert len(net.losses) == 12 and sum(net.losses[6:]) < sum(net.losses[:6])
    weights = m.full(net.state_dict())
    other = Deferred()
    run = m.trainer(m.sharded(), 2, tmp_path / "other", max_epochs=2)
    run.fit(other, m.loader(2), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert all(torch.equal(value, weights[name]) for name, value in m.full(other.state_dict()).items())


@on_ranks(2)
def test_mistakes(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from tests import lightning_models as m

    with pytest.raises(TypeError, match="zero_dp_strategi: .*Did you mean 'zero_dp_strategy'"):
        m.sharded(zero_dp_strategi=3)
    with pytest.raises(TypeError, match="device_mesh: the strategy sets it"):
        m.sharded(device_mesh=None)
    with pytest.raises(ValueError, match="divide the 2 ranks; got 3"):
        m.fit(m.sharded(replicas=3), 2, tmp_path)
    with pytest.raises(ValueError, match="16-mixed"):
        m.fit(m.sharded(), 2, tmp_path, precision="16-mixed")
    with pytest.raises(NotImplementedError, match="EMAWeightAveraging"):
        m.fit(m.sharded(), 2, tmp_path, callbacks=[StochasticWeightAveraging(1e-2)])
    with pytest.raises(ValueError, match="Expected the path of a checkpoint"):
        m.fit(m.sharded(), 2, tmp_path, tmp_path)
    run, net = m.fit(m.sharded(), 2, tmp_path, max_epochs=1)
    with pytest.raises(TypeError, match="storage_options"):
        run.save_checkpoint(tmp_path / "x", storage_options={})


def _other_import_name(folder: Path) -> None:
    import pytorch_lightning

    from megatron.fsdp.integrations.pytorch_lightning import MegatronFSDPStrategy
    from tests import lightning_models as m

    class Net(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(5, m.WIDTH), m.Block(), m.Block(), nn.Linear(m.WIDTH, 1))
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.body(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    losses = []
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for strategy in ("ddp", MegatronFSDPStrategy([m.Block])):
        net = Net()
        run = pytorch_lightning.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, default_root_dir=folder, **quiet
        )
        run.fit(net, m.loader(2))
        losses.append(net.losses)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_pytorch_lightning_as_import_name(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    ranks.run(2, _other_import_name, tmp_path)


@on_ranks(4)
@pytest.mark.slow
def test_replicas(tmp_path: Path) -> None:
    from tests import lightning_models as m

    _, expected = m.fit("ddp", 4, tmp_path / "ddp", gradient_clip_val=0.05)
    _, net = m.fit(m.sharded(replicas=2), 4, tmp_path / "hsdp", gradient_clip_val=0.05)
    torch.testing.assert_close(net.losses, expected.losses, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_bf16_mixed_computes_in_bf16_and_updates_fp32_weights(tmp_path: Path) -> None:
    from tests import lightning_models as m

    _, expected = m.fit("ddp", 2, tmp_path / "ddp", precision="32-true")
    _, net = m.fit(m.sharded(), 2, tmp_path / "mixed", precision="bf16-mixed")
    assert net.losses != expected.losses
    torch.testing.assert_close(net.losses, expected.losses, rtol=0.05, atol=0.02)
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    groups = net.__dict__["_megatron_fsdp_sharded"].engine.groups
    assert {(g.dtypes.compute, g.dtypes.grad_comm) for g in groups} == {(torch.bfloat16, torch.float32)}


def _adds_to_checkpoints(folder: Path, ranks: int, path: Path | None = None) -> list[Any]:
    """Train one epoch, or load its end. Return what a callback and a hook have added to the checkpoint."""
    from lightning.pytorch import Callback

    from tests import lightning_models as m

    class Average(Callback):
        state_key = "average"

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.batches = 0
            self.shadow = {name: value.detach().double() for name, value in module.named_parameters()}

        def on_train_batch_end(self, trainer: Any, module: Any, *unused: Any) -> None:
            self.batches += 1
            for name, value in module.named_parameters():
                self.shadow[name].lerp_(value.detach().double(), 0.1)

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow, "batches": self.batches}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow, self.batches = state["shadow"], state["batches"]

    class Net(m.Net):
        added: dict[str, Any]

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            head = self.head.weight.detach()
            self.added = {"model": {"head.weight": head + 1}, "optimizer_0": [head.norm(), 3], "a.b": [[head * 2], 4]}
            checkpoint.update(self.added)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.added = {key: checkpoint[key] for key in ("model", "optimizer_0", "a.b")}

    average, net = Average(), Net()
    run = m.trainer(m.sharded(), ranks, folder, max_epochs=1, callbacks=[average])
    run.fit(net, m.loader(ranks), ckpt_path=path)
    main = dict(net.named_parameters())
    found = [average.batches, *map(_whole, (average.shadow, net.added, net.state_dict()))]
    average.on_train_batch_end(run, net)  # on shards of the same layout
    for file in folder.parent.glob("*.consolidated"):
        loaded = run.strategy.load_checkpoint(file, weights_only=False)
        state = loaded["callbacks"]["average"]
        again = [state["batches"], state["shadow"], {key: loaded[key] for key in net.added}, loaded["state_dict"]]
        torch.testing.assert_close(again, found, rtol=0, atol=0)
    assert all(value.placements == main[name].placements for name, value in average.shadow.items())
    return found


def _whole(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, value)


def test_state_of_callbacks_and_hooks(ranks: RankPool, tmp_path: Path) -> None:
    from lightning.fabric.utilities.load import _load_distributed_checkpoint
    from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint

    expected = ranks.run(2, _adds_to_checkpoints, tmp_path, 2)[0]
    path = tmp_path / "epoch=0.ckpt"
    assert expected[0] == 6
    torch.save(_format_checkpoint(_load_distributed_checkpoint(path)), tmp_path / "epoch=0.ckpt.consolidated")
    for number in (2, 1):
        for found in ranks.run(number, _adds_to_checkpoints, tmp_path / str(number), number, path):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@on_ranks(2)
def test_options_that_a_checkpoint_lacks(tmp_path: Path) -> None:
    """Lightning saves without a scheduler's options, and loads into an optimizer that has them."""
    from lightning.pytorch.tuner import Tuner

    from tests import lightning_models as m

    class Without(m.Net):
        lr = 1e-2

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    losses = []
    for strategy in ("ddp", "fsdp"):
        run, net = m.trainer("ddp" if strategy == "ddp" else m.sharded(), 2, tmp_path / strategy), Without()
        found = Tuner(run).lr_find(net, m.loader(2), num_training=6, update_attr=False)
        run.fit(net, m.loader(2))
        path = tmp_path / strategy / "epoch=0.ckpt"
        _, resumed = m.fit("ddp" if strategy == "ddp" else m.sharded(), 2, tmp_path / strategy / "with", path)
        losses.append([*found.results["loss"], *net.losses, *resumed.losses])
    assert len(losses[0]) > 18
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_a_different_number_of_parameter_groups(tmp_path: Path) -> None:
    from tests import lightning_models as m

    class Two(m.Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([{"params": self.head.parameters()}, {"params": self.blocks.parameters()}])

    class One(m.Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.head.parameters())

    for saving, loading in ((Two, One), (One, Two)):
        path = tmp_path / saving.__name__
        m.trainer(m.sharded(), 2, path, max_epochs=1).fit(saving(), m.loader(2))
        with pytest.raises(RuntimeError, match="different number of parameter groups"):
            m.trainer(m.sharded(), 2, path / "other").fit(loading(), m.loader(2), ckpt_path=path / "epoch=0.ckpt")


@on_ranks(2)
def test_grad_norm(tmp_path: Path) -> None:
    from lightning.pytorch.utilities import grad_norm

    from tests import lightning_models as m

    class Net(m.Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = grad_norm(self, 2)
            self.log_dict(norms)
            self.losses.extend(float(norms[name]) for name in sorted(norms))

    found = []
    for strategy in ("ddp", m.sharded(zero_dp_strategy=1), m.sharded()):
        net = Net()
        m.trainer(strategy, 2, tmp_path, max_epochs=1).fit(net, m.loader(2))
        found.append(net.losses)
    assert len(found[0]) == 6 * (1 + len(list(net.parameters())) + 1)
    torch.testing.assert_close(found[1:], found[:1] * 2, rtol=1e-5, atol=1e-5)
