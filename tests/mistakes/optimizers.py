"""Mistakes with the optimizer."""

from tests.mistakes.case import Mistake, Theme

_CHECK = "assert_trains(model, optimizer)"

MISTAKES = (
    Mistake(
        "The optimizer of another model",
        "fully_shard(model, torch.optim.AdamW(Model().parameters()))",
        ValueError,
        ("fully_shard_optimizer: none of the optimizer's parameters belongs to a sharded model",),
    ),
    Mistake(
        "An optimizer from before, that is not sharded",
        """
        optimizer = adamw(model.parameters())
        model = fully_shard_model(model, fsdp_unit_modules=[Block])
        """,
        None,
        "its parameters stand for the main weights, and it is prepared at its first step.",
        _CHECK,
    ),
    Mistake(
        "An optimizer from after, that is not sharded",
        """
        model = fully_shard_model(model, fsdp_unit_modules=[Block])
        optimizer = adamw(model.parameters())
        """,
        None,
        "it has main weights already, and is prepared at its first step.",
        _CHECK,
    ),
    Mistake(
        "An optimizer of the inner model's parameters",
        """
        inner = model
        model = fully_shard_model(inner, fsdp_unit_modules=[Block])
        optimizer = fully_shard_optimizer(adamw(inner.parameters()))
        """,
        None,
        "they are the same parameters.",
        _CHECK,
    ),
    Mistake(
        "A class instead of an optimizer",
        "fully_shard(model, torch.optim.AdamW)",
        TypeError,
        ("optimizer: expected torch.optim.Optimizer; got AdamW",),
    ),
    Mistake(
        "A scheduler instead of an optimizer",
        "fully_shard_optimizer(torch.optim.lr_scheduler.ConstantLR(adamw(model.parameters())))",
        TypeError,
        ("optimizer: expected torch.optim.Optimizer; got a torch.optim.lr_scheduler.ConstantLR",),
    ),
    Mistake(
        "LBFGS",
        "fully_shard(model, torch.optim.LBFGS(model.parameters()))",
        NotImplementedError,
        ("LBFGS (torch.optim.lbfgs) does not work with sharded parameters", "Use AdamW or Muon"),
    ),
    Mistake(
        "SparseAdam",
        "fully_shard(model, torch.optim.SparseAdam(model.parameters()))",
        NotImplementedError,
        ("SparseAdam", "does not work with sharded parameters"),
    ),
    Mistake(
        "Adafactor with divided parameters",
        "fully_shard(model, torch.optim.Adafactor(model.parameters()), fsdp_unit_modules=[Block])",
        ValueError,
        ("Adafactor looks at whole parameters", "shard_granularity='parameter'"),
    ),
    Mistake(
        "Muon with divided matrices",
        """
        model = Model(width=64, depth=1)
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        fully_shard(model, torch.optim.Muon(matrices), fsdp_unit_modules=[Block])
        """,
        ValueError,
        ("Muon looks at whole matrices", "shard_granularity='tensor'"),
    ),
    Mistake(
        "An optimizer of one's own",
        """
        class Mine(torch.optim.Optimizer):
            def __init__(self, parameters):
                super().__init__(parameters, {})

        fully_shard(model, Mine(model.parameters()))
        """,
        NotImplementedError,
        ("Mine", "is not known to update sharded parameters correctly", "register_optimizer(Mine, 'element')"),
    ),
    Mistake(
        "An optimizer that is registered with an unknown word",
        'register_optimizer(torch.optim.SGD, "rows")',
        ValueError,
        ("register_optimizer: expected looks_at to be one of ('element', 'matrix', 'parameter'); got 'rows'",),
    ),
    Mistake(
        "An optimizer that is registered by name",
        'register_optimizer("SGD", "element")',
        ValueError,
        ("register_optimizer: expected a subclass of torch.optim.Optimizer; got 'SGD'",),
    ),
    Mistake(
        "A step before backward",
        """
        model, optimizer = fully_shard(model, adamw(model.parameters()), fsdp_unit_modules=[Block])
        optimizer.step()
        """,
        RuntimeError,
        ("The optimizer's step found no gradient on any of its parameters", "Call backward first"),
    ),
    Mistake(
        "State from an optimizer of another model",
        """
        other = nn.Linear(3, 3)
        before = adamw(other.parameters())
        other(torch.ones(3)).sum().backward()
        before.step()
        model, optimizer = fully_shard(model, adamw(model.parameters()), fsdp_unit_modules=[Block])
        optimizer.load_state_dict(before.state_dict())
        """,
        ValueError,
        ("doesn't match the size of optimizer's group",),
    ),
)

THEME = Theme("The optimizer", "model = Model()", MISTAKES)
