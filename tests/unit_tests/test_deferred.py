"""Deferred initialization: models get the values of normal construction, without reset methods."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.fsdp import deferred_init
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.init.deferred import recipes
from megatron_fsdp import fully_shard_model
from tests.models import STRATEGIES, assert_same_weights, device, main_weights
from tests.ranks import RankPool, on_ranks
from tests.simulated.ranks import fake_ranks

SEED = 7
numbers_of_the_host = pytest.mark.skipif(
    device().type == "cuda", reason="numbers drawn on the host differ from the device's"
)


class Filled(nn.Module):
    """A module with a parameter created by ``make``, and without a method to initialize it."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.value = nn.Parameter(make(), requires_grad=False)


def _part_of_a_larger_one() -> torch.Tensor:
    whole = torch.empty(4, 6)
    nn.init.xavier_normal_(whole)
    part = torch.empty(2, 6)
    part.data.copy_(torch.cat(torch.split(whole.to(torch.float64), 1)[1:3], dim=0))
    return part


def _with_a_zero_row() -> torch.Tensor:
    value = torch.empty(5, 3).normal_(std=0.02)
    value[2].zero_()
    return value


def _from_the_host() -> torch.Tensor:
    return torch.ones(3) * torch.tensor([1.0, 2.0, 3.0], device="cpu").to("meta" if _on_meta() else "cpu")


def _on_meta() -> bool:
    return torch.empty(0).is_meta


MADE: dict[str, Callable[[], torch.Tensor]] = {
    "ones": lambda: torch.ones(3),
    "computed": lambda: torch.arange(6.0).view(2, 3).t().contiguous() / 3 + 1,
    "drawn": lambda: torch.randn(3, 4),
    "drawn in place": lambda: nn.init.trunc_normal_(torch.empty(3, 4), std=0.1),
    "orthogonal, scaled": lambda: nn.init.orthogonal_(torch.empty(4, 4)).mul_(0.5).add_(1),
    "identity": lambda: nn.init.eye_(torch.empty(4, 4)),
    "sparse": lambda: nn.init.sparse_(torch.empty(4, 4), 0.5),
    "numbers": lambda: torch.tensor([1.0, 2.5]),
    "one number": lambda: torch.tensor(3),
    "part of a larger one": _part_of_a_larger_one,
    "a row of zeros": _with_a_zero_row,
    "from the host": _from_the_host,
    "like another": lambda: torch.rand_like(torch.zeros(2, 2)),
    "drawn in bf16": lambda: torch.empty(3, 4, dtype=torch.bfloat16).uniform_(),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE.keys())
def test_values_equal_those_of_a_model_built_on_the_device(make: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(SEED)
    expected = Filled(make).value
    module = deferred_init(Filled, make)
    assert module.value.is_meta
    torch.manual_seed(SEED)
    recipe = recipes(module)["value"]
    assert recipe is not None and recipe.gives_values
    value = recipe.run(torch.device("cpu"))
    assert torch.equal(value, expected) and value.dtype == expected.dtype


def test_dtype_changed_later() -> None:
    module = deferred_init(Filled, MADE["drawn"]).to(torch.bfloat16)
    torch.manual_seed(SEED)
    expected = torch.randn(3, 4)
    torch.manual_seed(SEED)
    recipe = recipes(module)["value"]
    assert recipe is not None and torch.equal(recipe.run(torch.device("cpu")), expected)


def test_uninitialized_memory_gives_no_values() -> None:
    recipe = recipes(deferred_init(Filled, lambda: torch.empty(3, 4)))["value"]
    assert recipe is not None and not recipe.gives_values
    assert recipe.run(torch.device("cpu")).shape == (3, 4)


def test_tensors_from_outside_the_recording_are_unknown() -> None:
    with torch.device("meta"):
        strange = torch.ones(3)
    assert recipes(deferred_init(Filled, lambda: strange * 2))["value"] is None


def test_changed_source_raises() -> None:
    source = torch.ones(3)
    module = deferred_init(Filled, lambda: torch.zeros(3).copy_(source))
    source.add_(1)
    recipe = recipes(module)["value"]
    assert recipe is not None
    with pytest.raises(RuntimeError, match=r"copy_.* was changed after the model was built"):
        recipe.run(torch.device("cpu"))


class Model(nn.Module):
    """A model with layers whose methods would give other values, tied weights, buffers, and a direct parameter."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(3))
        for layer in self.layers:
            nn.init.constant_(layer[0].bias, 0.25)
        self.norm = nn.BatchNorm1d(width)
        self.norm.running_mean.fill_(0.5)
        self.gain = nn.Parameter(torch.full((width,), 2.0))
        self.head = nn.Linear(width, 17, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(5))

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x) * self.gain)


@on_ranks("world_size")
@numbers_of_the_host
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_sharded_model_is_initialized_as_it_was_built(world_size: int, strategy: str) -> None:
    torch.manual_seed(SEED)
    reference = Model()
    model = deferred_init(Model)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    torch.manual_seed(SEED)
    # The order of Model: the embedding, then the layers. The head's original weight has been replaced.
    sharded = fully_shard_model(
        model,
        fsdp_unit_modules=[nn.Sequential],
        zero_dp_strategy=strategy,
        init_model_with_meta_device=True,
        device=device(),
    )
    assert_same_weights(sharded, reference, tolerance=0)
    buffers = dict(sharded.module.named_buffers())
    for name, buffer in reference.named_buffers():
        assert torch.equal(buffers[name].cpu(), buffer), name
    assert not any(recipes(module) for module in model.modules())
    sharded(torch.zeros(4, dtype=torch.long, device=device())).sum().backward()


def _built_alike(build: Callable[[], nn.Module], units: list[Any]) -> list[str]:
    """Check that the sharded model is as if built on the device from the same random state. Returns names of units."""
    torch.manual_seed(SEED)
    reference = build()
    next_number = torch.rand(())
    torch.manual_seed(SEED)
    sharded = fully_shard_model(
        deferred_init(build), fsdp_unit_modules=units, init_model_with_meta_device=True, device=device()
    )
    assert_same_weights(sharded, reference, tolerance=0)
    for buffer, expected in zip(sharded.module.buffers(), reference.buffers(), strict=True):
        assert torch.equal(buffer, expected)
    assert torch.rand(()) == next_number
    return sharded.engine.unit_names


def test_what_is_drawn_for_a_tensor_from_outside_is_left_out() -> None:
    outside = torch.empty(3, device="meta")

    def build() -> nn.Module:
        return nn.Sequential(Filled(outside.normal_), Filled(lambda: torch.ones(2)), Filled(lambda: torch.randn(2)))

    unknown, *known = [recipes(module)["value"] for module in deferred_init(build)]
    assert unknown is None
    assert [recipe.run(torch.device("cpu")).shape for recipe in known if recipe] == [(2,), (2,)]


class Base(nn.Module):
    """A layer whose subclass replaces a part, as multi-latent attention in Megatron does."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)
        nn.init.orthogonal_(torch.empty(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)


class Latent(Base):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 6)
        self.down = nn.Linear(6, 3)


class Around(nn.Module):
    """Draws for itself before, between and after its layers, whose numbers it replaces, and ends with one for nothing.

    The layers are registered in a different order than that in which they are built.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.randn(4))
        self.gate = nn.Parameter(torch.rand(3))
        last, first = nn.Linear(6, 6), nn.Linear(6, 6)
        self.layers = nn.Sequential(first, last)
        self.copied = nn.Parameter(last.weight.detach() * torch.rand_like(self.gate).sum())
        self.head = nn.Linear(6, 3)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight)
        nn.init.orthogonal_(self.head.weight)
        torch.rand(7)


def _llama() -> nn.Module:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=97, initializer_range=0.05, **sizes))


def _attention() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.MultiheadAttention(6, 2)) for _ in range(3)))


def _latent() -> nn.Module:
    return nn.Sequential(Latent(), Latent())


@numbers_of_the_host
@pytest.mark.parametrize(
    ("build", "units"),
    [
        (_attention, ["Sequential"]),
        (_latent, [Latent]),
        (Around, [nn.Linear]),
        (Around, [nn.Sequential]),
        (_llama, ["LlamaDecoderLayer"]),
        (_llama, [nn.Linear, nn.Embedding]),
    ],
)
def test_random_numbers_are_those_of_the_model_built_on_the_device(
    ranks: RankPool, build: Callable[[], nn.Module], units: list[Any]
) -> None:
    if build is _llama:
        pytest.importorskip("transformers")
    ranks.run(2, _built_alike, build, units)


@on_ranks(2)
def test_a_copy_has_the_values_of_the_model() -> None:
    student = deferred_init(_latent)
    teacher = copy.deepcopy(student)
    settings: dict[str, Any] = {"fsdp_unit_modules": [Latent], "init_model_with_meta_device": True, "device": device()}
    both = [main_weights(fully_shard_model(model, **settings)) for model in (student, teacher)]
    assert all(torch.equal(weight, both[1][name]) for name, weight in both[0].items())


class HeadLast(nn.Module):
    """A model whose direct parameters are created after its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)))
        self.head = nn.Embedding(3, 6)


@on_ranks(2)
@numbers_of_the_host
def test_a_root_that_was_built_last_is_initialized_last() -> None:
    assert _built_alike(HeadLast, [nn.Linear]) == ["", "layers.0", "layers.1"]


def _transformer() -> None:
    sharded = fully_shard_model(
        deferred_init(_llama),
        fsdp_unit_modules=["LlamaDecoderLayer"],
        init_model_with_meta_device=True,
        device=device(),
    )
    for name, weight in main_weights(sharded).items():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert weight.std() == pytest.approx(0.05, rel=0.1), name
    tokens = torch.arange(20, device=device())[None]
    assert sharded(tokens, labels=tokens).loss.item() == pytest.approx(torch.tensor(97.0).log().item(), rel=0.1)


def test_model_of_transformers(ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    ranks.run(2, _transformer)


# Each rank draws its shards ----------------------------------------------------------------------------------------


class _Ways(nn.Module):
    """Parameters that are initialized in different ways, at sizes that show a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.table = nn.Linear(60, 50), nn.LayerNorm(50), nn.Embedding(70, 50, padding_idx=3)
        self.attention = nn.MultiheadAttention(50, 5)
        self.normal = Filled(lambda: nn.init.trunc_normal_(torch.empty(50, 40), std=0.02).mul_(10))
        self.drawn = Filled(lambda: torch.rand(60, 50))
        self.orthogonal = Filled(lambda: nn.init.orthogonal_(torch.empty(40, 40)))


def _of_all_ranks(value: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value.contiguous())
    return found


@on_ranks(4)
@pytest.mark.parametrize("recorded", [True, False], ids=["deferred", "reset methods"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_draw_their_shards(strategy: str, recorded: bool) -> None:
    dist_sizes: dict[str, Any] = {
        "device_mesh": init_device_mesh(device().type, (2, 2), mesh_dim_names=("outer", "inner"))
    }
    dist_sizes |= {"dp_shard_dim": "inner", "dp_outer_dim": "outer"}
    torch.manual_seed(SEED)
    if recorded:
        model: nn.Module = deferred_init(_Ways)
    else:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(60, 50), nn.LayerNorm(50), nn.Embedding(70, 50, padding_idx=3))
    torch.manual_seed(SEED)
    settings = {"init_model_with_meta_device": True, "init_per_shard": True, "zero_dp_strategy": strategy, **dist_sizes}
    sharded = fully_shard_model(model, fsdp_unit_modules=[nn.Linear], device=device(), **settings)
    state = torch.rand(3)
    assert all(torch.equal(state, other) for other in _of_all_ranks(state)), "random states differ after sharding"
    for name, value in main_weights(sharded).items():
        assert all(torch.equal(value, other) for other in _of_all_ranks(value)), f"replicas of {name} differ"
        found = value.float()
        if name.endswith("linear.weight") or name == "0.weight":
            # Uniform in 1 / sqrt(60), as drawn for the full tensor. No two shards have equal numbers.
            assert found.abs().max() <= 60**-0.5 and abs(found.std() / (60**-0.5 / 3**0.5) - 1) < 0.05
            assert found.unique().numel() > 0.99 * found.numel()
        elif name.endswith("norm.weight") or name == "1.weight":
            assert torch.equal(found, torch.ones_like(found))
        elif name.endswith("table.weight") or name == "2.weight":
            assert not found[3].any() and abs(found.std() - 1) < 0.05
        elif "normal" in name:
            assert abs(found.std() - 0.2) < 0.01 and found.unique().numel() > 0.99 * found.numel()
        elif "drawn" in name:
            assert abs(found.mean() - 0.5) < 0.02 and found.min() >= 0
        elif "orthogonal" in name:
            torch.testing.assert_close(found @ found.T, torch.eye(40), rtol=0, atol=1e-4)
        elif name.endswith("bias") and "attention" in name:
            assert not found.any()


class _Touched(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operator has written or read."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            found = [t for t in tree_leaves((result, args)) if isinstance(t, torch.Tensor) and not t.is_meta]
            self.largest = max([self.largest, *(t.numel() for t in found)])
        return result


@on_ranks(1)
def test_a_rank_that_draws_its_shards_touches_no_full_weights() -> None:
    """Their memory would be most of the time of starting on many ranks."""
    for per_shard in (False, True):
        with fake_ranks(64), _Touched() as touched:
            model = deferred_init(nn.Linear, 256, 256)
            fully_shard_model(
                model, fsdp_unit_modules=[nn.Linear], init_model_with_meta_device=True, init_per_shard=per_shard
            )
        assert (touched.largest < 256 * 256 / 32) == per_shard


def test_shards_are_drawn_for_models_without_values_only() -> None:
    with pytest.raises(ValueError, match="init_per_shard: expected init_model_with_meta_device=True"):
        FSDPConfig(init_per_shard=True)
