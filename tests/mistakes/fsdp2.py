"""Mistakes with the interface of FSDP2."""

from tests.mistakes.case import Mistake, Theme

MISTAKES = (
    Mistake(
        "A list of modules",
        "fully_shard(model.blocks)",
        ValueError,
        ("fully_shard: expected a module that has a forward; got ModuleList.",),
    ),
    Mistake("A class", "fully_shard(Block)", ValueError, ("fully_shard: expected a module that has a forward; got",)),
    Mistake(
        "The same module twice",
        "fully_shard(model)\nfully_shard(model)",
        ValueError,
        ("fully_shard was called on this", "before. Call it once per module."),
    ),
    Mistake(
        "Ignored parameters",
        "fully_shard(model, ignored_params={model.head.weight})",
        NotImplementedError,
        ("ignored_params: every parameter of the module is sharded. Leave it empty.",),
    ),
    Mistake(
        "A number of ranks that does not divide the mesh",
        "fully_shard(model, reshard_after_forward=3)",
        ValueError,
        ("reshard_after_forward: expected a divisor of the mesh's 2 ranks; got 3.",),
    ),
    Mistake(
        "Another dimension to shard",
        "fully_shard(model, shard_placement_fn=lambda parameter: Shard(1))",
        NotImplementedError,
        ("shard_placement_fn: expected None or Shard(0)",),
    ),
    Mistake(
        "Different meshes in one model",
        """
        fully_shard(model.blocks[0], mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])
        fully_shard(model)
        model(tokens_of())
        """,
        NotImplementedError,
        ("mesh: blocks.0 and the modules around it must have the same mesh.",),
    ),
    Mistake(
        "The whole model last, after a forward of a part",
        """
        fully_shard(model.blocks[0])
        model.blocks[0](torch.ones(2, 13))
        fully_shard(model)
        model(tokens_of())
        """,
        RuntimeError,
        ("blocks.0 is already sharded as a separate model", "Call fully_shard on the whole model first."),
    ),
    Mistake(
        "A strategy where only units are marked",
        "fully_shard(model, zero_dp_strategy=3)",
        TypeError,
        ("fully_shard() got an unexpected keyword argument 'zero_dp_strategy'",),
    ),
    Mistake(
        "Registering a method that does not exist",
        'register_fsdp_forward_method(fully_shard(model), "encode")',
        ValueError,
        ("register_fsdp_forward_method:", "has no method 'encode'"),
    ),
    Mistake(
        "Prefetching a module that is not sharded",
        "fully_shard(model).set_modules_to_forward_prefetch([model.blocks[0]])",
        ValueError,
        ("Expected modules that fully_shard was called on; got Block.",),
    ),
    Mistake(
        "Loading into a part",
        "fully_shard(model.blocks[0])\nfully_shard(model)\nmodel.blocks[0].load_state_dict(Block(13).state_dict())",
        NotImplementedError,
        ("load_state_dict of a submodule of a sharded model: load into the whole model.",),
    ),
    Mistake(
        "fully_shard of the whole model only",
        "fully_shard(model)\noptimizer = adamw(model.parameters())",
        None,
        "the model is one unit.",
        "train(model, optimizer)\nfor name, weight in unsharded().named_parameters():\n"
        "    torch.testing.assert_close(model.get_parameter(name).full_tensor(), weight, rtol=2e-5, atol=2e-5)",
    ),
)

THEME = Theme(
    "The interface of FSDP2",
    """
    from megatron.fsdp.fsdp2 import fully_shard, register_fsdp_forward_method
    from torch.distributed.tensor import Shard

    model = Model()
    """,
    MISTAKES,
)
