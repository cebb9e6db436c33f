"""Hugging Face's accelerate with sharded models: its loop trains, saves and resumes as it does without sharding."""

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from megatron_fsdp import fully_shard_model
from tests.huggingface_training import fresh_process, llama, samples
from tests.ranks import ROOT, RankPool, on_ranks

pytest.importorskip("accelerate")
# Batches of an epoch, and how many of them one step accumulates: the last step of an epoch has fewer.
BATCHES, ACCUMULATED, EPOCHS = 7, 2, 2


class Loop:
    """A loop as accelerate's documentation has it, on a global micro-batch of four samples.

    Args:
        strategy: Of sharding; None for a plain Accelerator.
        model: The model; None for a small Llama.
        scale: Where loss scaling starts, as accelerate has it for fp16 on a GPU; None for none.
        **options: Of the Accelerator.
    """

    def __init__(
        self,
        strategy: int | None,
        model: Any = None,
        scale: float | None = None,
        **options: Any,
    ) -> None:
        from accelerate import Accelerator, DataLoaderConfiguration

        from megatron.fsdp.integrations.accelerate import FSDPAccelerator

        fresh_process()
        order = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=0)
        options = {"cpu": True, "gradient_accumulation_steps": ACCUMULATED, "dataloader_config": order, **options}
        if strategy is None:
            self.accelerator = Accelerator(**options)
        else:
            self.accelerator = FSDPAccelerator(sharding={"zero_dp_strategy": strategy}, **options)
        if scale is not None:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
        model = model or llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        data: Any = DataLoader(samples(4 * BATCHES), batch_size=4, shuffle=True)
        # The order of the arguments does not matter.
        self.optimizer, self.model, self.data, self.scheduler = self.accelerator.prepare(
            optimizer, model, data, scheduler
        )
        if scale is not None:  # so that clip_grad_norm_ removes the scale
            self.accelerator.native_amp, self.accelerator.state._mixed_precision = True, "fp16"
        self.losses: list[float] = []
        self.norms: list[float] = []

    def epochs(self, *numbers: int) -> "Loop":
        """Train for epochs with these numbers."""
        for epoch in numbers:
            self.data.set_epoch(epoch)
            for batch in self.data:
                with self.accelerator.accumulate(self.model):
                    # A mean over as many tokens on each rank: the mean over ranks is that of all samples.
                    loss = self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                        assert type(norm) is torch.Tensor
                        self.norms.append(norm.item())
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(self.accelerator.gather(loss.detach()[None]).mean().item())
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        """All full parameters, on every rank."""
        parameters = self.accelerator.unwrap_model(self.model).named_parameters()
        return {name: getattr(p.detach(), "full_tensor", p.detach().clone)() for name, p in parameters}


def train(strategy: int | None) -> tuple[list[float], list[float], float, dict[str, torch.Tensor]]:
    loop = Loop(strategy).epochs(*range(EPOCHS))
    return loop.losses, loop.norms, loop.scheduler.get_last_lr()[0], loop.weights()


def test_training_equals_unsharded(ranks: RankPool) -> None:
    (expected,) = ranks.run(1, train, None)
    losses, norms, rate, weights = expected
    assert len(losses) == EPOCHS * BATCHES and min(norms) > 0.5
    assert len(norms) == EPOCHS * math.ceil(BATCHES / ACCUMULATED)
    assert rate == pytest.approx(1e-2 * 0.9 ** len(norms))
    for strategy in (1, 2, 3):
        for found in ranks.run(2, train, strategy):
            assert found[0] == pytest.approx(losses, rel=2e-4)
            assert found[1] == pytest.approx(norms, rel=2e-4)
            assert found[2] == rate
            torch.testing.assert_close(found[3], weights, rtol=1e-3, atol=2e-5)


def accumulates() -> None:
    """Only the last micro-batch of a step communicates gradients, which no loss shows."""
    loop = Loop(1)
    entered: list[None] = []
    no_sync = loop.model.no_sync
    loop.model.no_sync = lambda: entered.append(None) or no_sync()
    loop.epochs(0)
    assert len(entered) == BATCHES - len(loop.norms) > 0


def test_micro_batches_that_are_accumulated_do_not_communicate(ranks: RankPool) -> None:
    ranks.run(2, accumulates)


def scaled(strategy: int | None, scale: float) -> tuple[list[float], list[float], float, float]:
    loop = Loop(strategy, scale=scale).epochs(0)
    return loop.losses, loop.norms, loop.accelerator.scaler.get_scale(), loop.scheduler.get_last_lr()[0]


# With the second scale, gradients overflow in the first steps, which are skipped.
@pytest.mark.parametrize("scale", [pytest.param(256.0, marks=pytest.mark.slow), 3e38])
def test_loss_scaling_is_as_with_ddp(ranks: RankPool, scale: float) -> None:
    expected = ranks.run(2, scaled, None, scale)[0]
    assert expected[2] != scale and (math.inf in expected[1]) == (scale > 1e38)
    for found in ranks.run(2, scaled, 3, scale):
        assert found[2:] == expected[2:]
        assert found[0] == pytest.approx(expected[0], rel=2e-4)
        assert found[1] == pytest.approx(expected[1], rel=2e-4)


def from_state(
    strategy: int, folder: Path, saves: bool, dropout: float = 0.2
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train two epochs, and save in between; or load what was saved, and train the second."""
    # The dropout shows whether random states are restored.
    loop = Loop(strategy, model=llama(0 if saves else 7, attention_dropout=dropout))
    seen: list[int] = []
    loop.accelerator.register_save_state_pre_hook(lambda models, *unused: seen.append(len(models)))
    if saves:
        loop.epochs(0).accelerator.save_state(str(folder))
        assert seen == [1]
    else:
        loop.accelerator.load_state(str(folder))
    loop.losses.clear()
    return loop.epochs(1).losses, loop.weights()


def test_resumed_training_is_bit_equal(ranks: RankPool, tmp_path: Path) -> None:
    for strategy in (1, 3):
        folder = tmp_path / str(strategy)
        saved = ranks.run(2, from_state, strategy, folder, True)
        loaded = ranks.run(2, from_state, strategy, folder, False)
        for (losses, weights), (expected, expected_weights) in zip(loaded, saved, strict=True):
            assert losses == expected
            assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())


@pytest.mark.slow
def test_resuming_on_other_numbers_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    losses, weights = ranks.run(2, from_state, 3, tmp_path, True, 0.0)[0]
    for found in ranks.run(4, from_state, 3, tmp_path, False, 0.0):
        assert found[0] == pytest.approx(losses, rel=2e-4)
        torch.testing.assert_close(found[1], weights, rtol=1e-3, atol=2e-5)


@on_ranks(2)
def test_state_of_a_killed_save(tmp_path: Path) -> None:
    """A save that was killed before its shards were complete leaves the earlier one, and is not loaded itself."""
    from accelerate.utils import ProjectConfiguration

    naming = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    # With ZeRO-1, compute weights stay on every rank: loading has to replace them, too.
    loop = Loop(1, project_config=naming).epochs(0)
    loop.accelerator.save_state()
    expected, batch = loop.weights(), samples(2, seed=3)
    tokens = torch.stack([sample["input_ids"] for sample in batch])
    logits = loop.model(input_ids=tokens).logits.detach()
    loop.epochs(1).accelerator.save_state()
    dist.barrier()
    (tmp_path / "checkpoints" / "checkpoint_1" / "megatron_fsdp" / ".metadata").unlink(missing_ok=True)
    dist.barrier()
    before = loop.weights()
    with pytest.raises(Exception, match="checkpoint_1"):
        loop.accelerator.load_state()
    assert all(torch.equal(loop.weights()[name], value) for name, value in before.items())
    loop.accelerator.load_state(str(tmp_path / "checkpoints" / "checkpoint_0"))
    assert all(torch.equal(loop.weights()[name], value) for name, value in expected.items())
    assert torch.equal(loop.model(input_ids=tokens).logits, logits)


def hooked(folder: Path, strategy: int | None) -> tuple[list[int], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Hooks save half of the weights, and load them, as those of diffusers' scripts do with adapters."""
    loop = Loop(strategy)
    accelerator, before, seen = loop.accelerator, loop.weights(), []

    def saves(models: list[Any], weights: list[dict[str, torch.Tensor]], to: str) -> None:
        seen.extend([len(models), len(weights)])
        halved = {name: value / 2 for name, value in weights.pop().items()}
        assert halved.keys() == accelerator.get_state_dict(models[0], unwrap=False).keys()
        accelerator.save(halved, f"{to}/half.pt")

    def loads(models: list[Any], origin: str) -> None:
        seen.append(len(models))
        models.pop().load_state_dict(torch.load(f"{origin}/half.pt"))

    accelerator.register_save_state_pre_hook(saves)
    accelerator.register_load_state_pre_hook(loads)
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(folder))
    return seen, before, loop.weights()


def test_hooks_save_and_load_models(ranks: RankPool, tmp_path: Path) -> None:
    for strategy in (None, 1, 3):
        for seen, before, after in ranks.run(2, hooked, tmp_path / str(strategy), strategy):
            assert seen == [1, 1, 1]
            before = {name.removeprefix("module."): value / 2 for name, value in before.items()}
            assert all(torch.equal(value, before[name.removeprefix("module.")]) for name, value in after.items())


@on_ranks(2)
def test_a_different_optimizer(tmp_path: Path) -> None:
    from megatron.fsdp.checkpoint import loading

    Loop(3).epochs(0).accelerator.save_state(str(tmp_path))
    loop = Loop(3)
    next(iter(loop.model.parameters())).requires_grad_(False)
    loop.optimizer.param_groups[0]["added"] = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading.logger, "warning", warning := Mock())
        loop.accelerator.load_state(str(tmp_path))
    assert "added" not in loop.optimizer.param_groups[0]
    # The state of the frozen parameter.
    assert "3 keys unexpected:\n  optimizer_0.state.0." in str(warning.call_args.args[-1])
    loop.optimizer.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with pytest.raises(RuntimeError, match="expected 2 parameter groups, .* different number of parameter groups, 1"):
        loop.accelerator.load_state(str(tmp_path))


@on_ranks(2)
def test_whole_models_are_saved(tmp_path: Path) -> None:
    from safetensors.torch import load_model
    from transformers import LlamaForCausalLM

    loop = Loop(3).epochs(0)
    accelerator, weights = loop.accelerator, loop.weights()
    whole = accelerator.get_state_dict(loop.model)
    assert bool(whole) == accelerator.is_main_process
    # As accelerate's documentation has it.
    accelerator.unwrap_model(loop.model).save_pretrained(
        tmp_path / "pretrained",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=whole,
    )
    accelerator.save_model(loop.model, tmp_path / "model")
    # Without a state dict, the model's own method gathers one.
    accelerator.unwrap_model(loop.model).save_pretrained(tmp_path / "gathered")
    accelerator.unwrap_model(loop.model).save_pretrained(tmp_path / "variant", variant="other")
    accelerator.wait_for_everyone()
    assert [path.name for path in (tmp_path / "variant").glob("*.safetensors")] == ["model.other.safetensors"]
    for name in ("pretrained", "model", "gathered"):
        assert [path.name for path in (tmp_path / name).glob("*.safetensors")] == ["model.safetensors"]
    pretrained, other = LlamaForCausalLM.from_pretrained(tmp_path / "pretrained"), llama(7)
    load_model(other, tmp_path / "model" / "model.safetensors")
    for model in (pretrained, other):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())


@on_ranks(2)
def test_prepare_wraps_once() -> None:
    from megatron_fsdp import MegatronFSDP, fully_shard

    loop = Loop(2)
    accelerator, model = loop.accelerator, loop.model
    assert isinstance(model, MegatronFSDP) and model.fsdp_config.zero_dp_strategy == "optim_grads"
    assert len(model.engine.units) == 3, "one unit per transformer block, and the root"
    again = accelerator.prepare(model, accelerator.unwrap_model(model), loop.optimizer)
    assert again[0] is again[1] is model and again[2] is loop.optimizer
    assert accelerator._models == [model] and accelerator._optimizers == [loop.optimizer]

    # A second model, sharded by the user, and an optimizer prepared later.
    other, optimizer = fully_shard(
        whole := llama(1), torch.optim.SGD(whole.parameters(), 0.1), fsdp_unit_modules=["LlamaDecoderLayer"]
    )
    assert accelerator.prepare(other) is other
    prepared = accelerator.prepare(optimizer)
    assert prepared.optimizer is optimizer
    # And a third one, by another Accelerator of the same process.
    third = type(accelerator)(cpu=True).prepare(llama(2))
    # Models of different classes, each with its own units.
    both = type(accelerator)(cpu=True, sharding={"fsdp_unit_modules": ["LlamaDecoderLayer", torch.nn.Conv1d]})
    different = both.prepare(llama(3), torch.nn.Sequential(torch.nn.Conv1d(2, 2, 1)))
    assert [each.engine.unit_names for each in different] == [["", "model.layers.0", "model.layers.1"], ["", "0"]]
    # And a module among the units.
    units = ["LlamaDecoderLayer", (pretrained := llama(4)).model.norm]
    of_module = type(accelerator)(cpu=True, sharding={"fsdp_unit_modules": units}).prepare(pretrained)
    assert of_module.engine.unit_names == ["", "model.layers.0", "model.layers.1", "model.norm"]
    with pytest.raises(ValueError, match="has no LlamaDecoderLayer, Conv1d. Give the classes of every model"):
        both.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    batch = next(iter(loop.data))["input_ids"]
    for each in (other, third, model):
        each(input_ids=batch, labels=batch).loss.backward()
        assert all(p.grad is not None for p in each.parameters())
    before = {name: value.clone() for name, value in other.state_dict().items()}
    prepared.step()
    assert any(
        not torch.equal(value.full_tensor(), other.state_dict()[name].full_tensor()) for name, value in before.items()
    )
    accelerator.free_memory()
    assert accelerator.prepare(accelerator.unwrap_model(model)) is model and accelerator._models == [model]


# Some models list their embeddings as well, which may be tied to the head.
@on_ranks(2)
@pytest.mark.parametrize("name", ["bert", pytest.param("t5", marks=pytest.mark.slow)])
def test_units_are_found(name: str) -> None:
    from megatron_fsdp import unit_classes
    from tests.functional_tests.test_transformers import LOSSES, MODELS, adamw, batches, build, language_loss
    from tests.models import assert_same_training

    model, _ = build(name)
    found = unit_classes(model)
    assert set(found) >= set(MODELS[name].units)
    assert_same_training(
        model, batches(), adamw, LOSSES.get(name, language_loss), tolerance=1e-5, fsdp_unit_modules=found
    )


@on_ranks(2)
def test_what_does_not_work_raises_an_error() -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration
    from torch.nn.parallel import DistributedDataParallel

    from megatron.fsdp.integrations.accelerate import FSDPAccelerator

    def with_plugin() -> None:
        accelerator = Accelerator(cpu=True)
        # accelerate ignores the plugin on a CPU.
        accelerator.state.fsdp_plugin = object()
        FSDPAccelerator.adopt(accelerator, {})

    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: FSDPAccelerator(cpu=True, dynamo_backend="eager"), "torch.compile"),
        (FSDPAccelerator, "cpu=True"),
        (with_plugin, "fsdp_plugin: leave it out"),
        (
            lambda: FSDPAccelerator(cpu=True, project_config=ProjectConfiguration(save_on_each_node=True)),
            "save_on_each_node",
        ),
        (lambda: FSDPAccelerator(cpu=True).prepare(DistributedDataParallel(llama())), "DistributedDataParallel"),
        (lambda: FSDPAccelerator(cpu=True, sharding={"zero_stage": 3}).prepare(llama()), "zero_stage"),
    ]
    for build, message in cases:
        fresh_process()
        with pytest.raises((ValueError, TypeError), match=message):
            build()
    with pytest.raises(NotImplementedError, match="even_batches"):
        FSDPAccelerator(cpu=True).join_uneven_inputs([])


def test_the_page_translates_fsdp_config() -> None:
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY, FSDP_SHARDING_STRATEGY
    from transformers import TrainingArguments

    options = {option for action in launch_command_parser()._actions for option in action.option_strings}
    page = (ROOT / "docs" / "frameworks" / "huggingface.md").read_text()
    table = page.partition("| accelerate's `fsdp_config` | here |")[2].partition("\n\n")[0]
    translated = set(re.findall(r"fsdp_\w+", "".join(row.split("|")[1] for row in table.splitlines()[2:])))
    assert {option[2:] for option in options if option.startswith("--fsdp_")} - translated == set()
    assert [name for name in FSDP_AUTO_WRAP_POLICY + FSDP_SHARDING_STRATEGY if f"{name}`" not in table] == []
    keys = TrainingArguments.__doc__.partition("fsdp_config (`str`")[2].partition("> DeepSpeed")[0]  # type: ignore[union-attr]
    of_trainer = set(re.findall(r"- (?!xla)(\w+) \(`", keys)) - {name.removeprefix("fsdp_") for name in translated}
    assert of_trainer == {"cpu_offload"} and "`cpu_offload` is `fsdp_offload_params`" in page
    arguments = set(re.findall(r"`(\w+)(?:=[^`]*)?`", "".join(row.split("|")[2] for row in table.splitlines()[2:])))
    known = {*inspect.signature(fully_shard_model).parameters, "save_model", "save_state"}
    known |= {"TrainingArguments", "gradient_checkpointing"}
    assert {name for name in arguments if not name.isdecimal()} - known == set()
