"""Training programs of several models, adapters or averages train sharded models as unsharded ones."""

import copy
import os
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron_fsdp import fully_shard, fully_shard_model
from tests.models import assert_same_weights, device
from tests.ranks import RankPool
from tests.unit_tests.test_same_answer import Block, Model

SETTINGS: dict[str, dict[str, Any]] = {
    "optim_grads_params": {"zero_dp_strategy": 3, "fsdp_unit_modules": [Block]},
    "optim": {"zero_dp_strategy": 1, "fsdp_unit_modules": [Block]},
    "without units": {"zero_dp_strategy": 3},
}
STEPS = 3


class Run:
    """One of two runs of a recipe: with sharded models, or with unsharded ones on the same data.

    Args:
        arguments: How to shard; None: not at all.
    """

    def __init__(self, arguments: dict[str, Any] | None) -> None:
        self.arguments = arguments
        self.models: list[nn.Module] = []
        self.losses: list[torch.Tensor] = []
        torch.manual_seed(0)

    def shard(self, model: nn.Module, parameters: Iterable[nn.Parameter] | None = None, rate: float = 0.1) -> Any:
        """The model and an optimizer of its parameters, both sharded."""
        model = model.to(device())
        optimizer = torch.optim.SGD(parameters or model.parameters(), rate, momentum=0.5)
        if self.arguments is not None:
            model, optimizer = fully_shard(model, optimizer, **self.arguments)
        self.models.append(model)
        return model, optimizer

    def shard_alone(self, model: nn.Module) -> nn.Module:
        """The model without an optimizer."""
        model = model.to(device()).requires_grad_(False)
        model = model if self.arguments is None else fully_shard_model(model, **self.arguments)
        self.models.append(model)
        return model

    def batches(self) -> Iterable[torch.Tensor]:
        """A batch for each step; every rank has others."""
        for step in range(STEPS):
            torch.manual_seed(10 * step + dist.get_rank())
            yield torch.randn(4, 6).to(device())

    def synchronize(self, model: nn.Module) -> None:
        """Average the gradients of an unsharded model."""
        if self.arguments is None:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        """Backward and an update."""
        loss.backward()
        self.synchronize(model)
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(loss.detach())


def _mean_teacher(run: Run) -> None:
    model = Model()
    teacher = run.shard_alone(copy.deepcopy(model))
    student, optimizer = run.shard(model)
    for batch in run.batches():
        with torch.no_grad():
            wanted = teacher(batch)
        run.step(student, optimizer, (student(batch + 0.1) - wanted).pow(2).mean() + student(batch).pow(2).mean())
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.mul_(0.5).add_(theirs, alpha=0.5)


def _average_for_evaluation(run: Run) -> None:
    """Parameters take an average as their .data, and then their own values again."""
    model, optimizer = run.shard(Model())
    parameters = dict(model.named_parameters())
    average = {name: p.detach().clone() for name, p in parameters.items()}
    for batch in run.batches():
        run.step(model, optimizer, model(batch).pow(2).mean())
        own = {}
        for name, p in parameters.items():
            average[name].lerp_(p.detach(), 0.5)
            own[name], p.data = p.data, average[name]
        average[name].mul_(0.9)  # is the last parameter, too
        with torch.no_grad():
            run.losses.append(model(batch).pow(2).mean())
        for name, p in parameters.items():
            p.data = own[name]


def _exchanged(run: Run) -> None:
    """Two parameters exchange their values; those of a third are put back after a write."""
    model, optimizer = run.shard(Model())
    ups = [block.up.weight for block in model.get_submodule("module" if run.arguments else "").blocks]
    for batch in run.batches():
        ups[0].data, ups[1].data, before = ups[1].data.clone(), ups[0].data, ups[2].detach()
        ups[2].data = ups[2].data * 2
        run.losses.append(model(batch).pow(2).mean().detach())
        ups[2].data = before
        run.step(model, optimizer, model(batch).pow(2).mean())


def _restarted(run: Run) -> None:
    """The optimizer restarts from its state before the first step, several times."""
    model, optimizer = run.shard(Model())
    start = copy.deepcopy(optimizer.state_dict())
    for batch in run.batches():
        for _ in range(2):
            run.step(model, optimizer, model(batch).pow(2).mean())
        optimizer.load_state_dict(start)


def _dqn(run: Run) -> None:
    model = Model()
    target = run.shard_alone(copy.deepcopy(model))
    online, optimizer = run.shard(model)
    for number, batch in enumerate(run.batches()):
        with torch.no_grad():
            wanted = 1 + 0.9 * target(batch + 1).amax(1)
        chosen = online(batch).gather(1, torch.zeros(4, 1, dtype=torch.long, device=batch.device))
        run.step(online, optimizer, F.smooth_l1_loss(chosen[:, 0], wanted))
        if number == 1:
            target.load_state_dict(online.state_dict())


def _wgan_gp(run: Run) -> None:
    generator, of_generator = run.shard(nn.Sequential(Model(), nn.Linear(5, 6)))
    critic, of_critic = run.shard(Model())
    for batch in run.batches():
        with torch.no_grad():
            made = generator(batch.flip(0))
        between = (0.3 * batch + 0.7 * made).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).pow(2).mean()
        run.step(critic, of_critic, critic(made).mean() - critic(batch).mean() + 10 * penalty)
        run.step(generator, of_generator, -critic(generator(batch.flip(0))).mean())
        of_critic.zero_grad()


def _dpo_with_lora(run: Run) -> None:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(base, lora).to(device())
    if run.arguments and run.arguments.get("fsdp_unit_modules"):
        run.arguments = {**run.arguments, "fsdp_unit_modules": ["LlamaDecoderLayer"]}
    model, optimizer = run.shard(adapted, [p for p in adapted.parameters() if p.requires_grad], rate=1.0)

    def log_probability(tokens: torch.Tensor) -> torch.Tensor:
        scores = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
        return scores.gather(-1, tokens[:, 1:, None]).sum((1, 2))

    for batch in run.batches():
        chosen, rejected = (torch.randint(32, (2, 6)).to(batch.device) for _ in range(2))
        margin = log_probability(chosen) - log_probability(rejected)
        with torch.no_grad(), adapted.disable_adapter():
            of_base = log_probability(chosen) - log_probability(rejected)
        run.step(model, optimizer, -F.logsigmoid(0.5 * (margin - of_base)).mean())


def _maml(run: Run) -> None:
    """Weights after a step of descent, through which the loss's gradients go."""
    model, optimizer = run.shard(Model())
    inner = model.get_submodule("module" if run.arguments else "")
    for batch in run.batches():
        weights = {n: p.full_tensor() if run.arguments else p for n, p in inner.named_parameters()}  # type: ignore[operator]
        loss = torch.func.functional_call(inner, weights, (batch,)).pow(2).mean()
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        faster = {name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes, strict=True)}
        run.step(model, optimizer, (torch.func.functional_call(inner, faster, (batch + 1,)) - 1).pow(2).mean())


def _clipping_by_accelerate(run: Run) -> None:
    """The list of parameters is from before ``prepare``."""
    from megatron.fsdp.integrations.accelerate import FSDPAccelerator

    os.environ["MASTER_ADDR"] = "localhost"
    model = Model().to(device())
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    kept = list(model.parameters())
    accelerator: Any = None
    if run.arguments is not None:
        accelerator = FSDPAccelerator(cpu=True, sharding={"fsdp_unit_modules": None, **run.arguments})
        model, optimizer = accelerator.prepare(model, optimizer)
    run.models.append(model)
    for batch in run.batches():
        loss = 100 * model(batch).pow(2).mean()
        loss.backward()
        run.synchronize(model)
        clip = nn.utils.clip_grad_norm_ if accelerator is None else accelerator.clip_grad_norm_
        run.losses += [loss.detach(), torch.as_tensor(clip(kept, 0.1))]
        optimizer.step()
        optimizer.zero_grad()


RECIPES: dict[str, Callable[[Run], None]] = {
    "mean teacher": _mean_teacher,
    "average for evaluation": _average_for_evaluation,
    "exchanged": _exchanged,
    "restarted": _restarted,
    "DQN": _dqn,
    "WGAN-GP": _wgan_gp,
    "DPO with LoRA": _dpo_with_lora,
    "MAML": _maml,
    "clipping by accelerate": _clipping_by_accelerate,
}
NEEDS = {"DPO with LoRA": "peft", "clipping by accelerate": "accelerate"}


def _trains_the_same(name: str, setting: str) -> None:
    reference, sharded = Run(None), Run(SETTINGS[setting])
    for run in (reference, sharded):
        torch.manual_seed(0)
        RECIPES[name](run)
    torch.testing.assert_close(sharded.losses, reference.losses, rtol=1e-4, atol=2e-5)
    for mine, theirs in zip(sharded.models, reference.models, strict=True):
        assert_same_weights(mine, theirs, 5e-5)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", RECIPES)
def test_recipe(ranks: RankPool, name: str, setting: str) -> None:
    if find_spec(NEEDS.get(name, "torch")) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    ranks.run(2, _trains_the_same, name, setting)
