"""Mistakes in the arguments of ``fully_shard``."""

from tests.mistakes.case import BUILT_MODEL, Mistake, Theme

_CHECK = "assert_trains(model, optimizer)"


MISTAKES = (
    Mistake(
        "A misspelled strategy",
        'fully_shard(model, optimizer, zero_dp_strategy="optim_grad_params")',
        ValueError,
        ("zero_dp_strategy: expected 0 or 'no_shard'", "got 'optim_grad_params'", "Did you mean 'optim_grads_params'"),
    ),
    Mistake(
        "A stage of ZeRO that does not exist",
        "fully_shard(model, optimizer, zero_dp_strategy=4)",
        ValueError,
        ("zero_dp_strategy: expected", "3 or 'optim_grads_params'; got 4"),
    ),
    Mistake(
        "The strategy of torch's FSDP",
        'fully_shard(model, optimizer, zero_dp_strategy="FULL_SHARD")',
        ValueError,
        ("zero_dp_strategy: expected", "got 'FULL_SHARD'. Use 'optim_grads_params'."),
    ),
    Mistake(
        "A strategy that the outer axis cannot have",
        "fully_shard(model, optimizer, outer_dp_sharding_strategy=3)",
        ValueError,
        ("outer_dp_sharding_strategy: expected 0 or 'no_shard', 1 or 'optim'; got 3",),
    ),
    Mistake(
        "An outer strategy that needs the inner one to shard",
        'fully_shard(model, optimizer, zero_dp_strategy=0, outer_dp_sharding_strategy="optim")',
        ValueError,
        ("outer_dp_sharding_strategy", "zero_dp_strategy", "'no_shard'", "Use"),
    ),
    Mistake(
        "A class that the model does not have",
        "fully_shard(model, optimizer, fsdp_unit_modules=[nn.TransformerEncoderLayer])",
        ValueError,
        ("fsdp_unit_modules: the model has no TransformerEncoderLayer. It has: Block, Embedding",),
    ),
    Mistake(
        "A misspelled name of a class",
        'fully_shard(model, optimizer, fsdp_unit_modules=["Blok"])',
        ValueError,
        ("fsdp_unit_modules: the model has no Blok. Did you mean 'Block'?",),
    ),
    Mistake(
        "An import path that does not exist",
        'fully_shard(model, optimizer, fsdp_unit_modules=["torch.nn.Linaer"])',
        ValueError,
        ("fsdp_unit_modules: cannot import 'torch.nn.Linaer'", "Did you mean 'Linear'?"),
    ),
    Mistake(
        "The list of layers instead of their class",
        "fully_shard(model, optimizer, fsdp_unit_modules=model.blocks)",
        TypeError,
        ("fsdp_unit_modules: expected classes of modules, or their names; got a tests.models.Block",),
    ),
    Mistake(
        "A module instead of its class",
        "fully_shard(model, optimizer, fsdp_unit_modules=[model.blocks[0]])",
        TypeError,
        ("fsdp_unit_modules: expected classes of modules, or their names; got a tests.models.Block",),
    ),
    Mistake(
        "A class instead of a list of classes",
        "model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=Block)",
        None,
        "a single class is a list of one.",
        _CHECK + "; assert len(model.engine.units) == 4",
    ),
    Mistake(
        "A name instead of a list of names",
        'model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules="Block")',
        None,
        "a single name is a list of one.",
        _CHECK + "; assert len(model.engine.units) == 4",
    ),
    Mistake(
        "No fsdp_unit_modules",
        "model, optimizer = fully_shard(model, optimizer)",
        None,
        "every rank keeps whole compute weights, as with DDP; gradients and optimizer state are sharded.",
        _CHECK,
    ),
    Mistake(
        "An argument of another engine",
        "fully_shard(model, optimizer, sharding_strategy=3)",
        TypeError,
        ("fully_shard: got an unexpected keyword argument 'sharding_strategy'.",),
    ),
    Mistake(
        "A misspelled argument",
        "fully_shard(model, optimizer, zero_dp_stratgy=3)",
        TypeError,
        ("fully_shard: got an unexpected keyword argument 'zero_dp_stratgy'. Did you mean 'zero_dp_strategy'?",),
    ),
    Mistake(
        "No optimizer",
        "fully_shard(model, fsdp_unit_modules=[Block])",
        TypeError,
        ("fully_shard: missing a required argument: 'optimizer'.",),
    ),
    Mistake(
        "The units in the place of the optimizer",
        "fully_shard(model, [Block])",
        TypeError,
        ("optimizer: expected torch.optim.Optimizer; got [<class",),
    ),
    Mistake(
        "Model and optimizer swapped",
        "fully_shard(optimizer, model)",
        TypeError,
        ("optimizer: expected torch.optim.Optimizer; got a tests.models.TinyModel",),
    ),
    Mistake(
        "Parameters instead of the model",
        "fully_shard(model.parameters(), optimizer)",
        TypeError,
        ("module: expected torch.nn.Module; got a generator",),
    ),
    Mistake(
        "A dtype as a string",
        'MixedPrecisionPolicy(main_params_dtype="fp32")',
        ValueError,
        ("MixedPrecisionPolicy: main_params_dtype: expected None or one of torch.float64", "got 'fp32'."),
    ),
    Mistake(
        "A dtype that is not a floating-point dtype",
        "MixedPrecisionPolicy(compute_dtype=torch.int8)",
        ValueError,
        ("MixedPrecisionPolicy: compute_dtype: expected None or one of", "got torch.int8"),
    ),
    Mistake(
        "The arguments of torch's policy",
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
        TypeError,
        ("MixedPrecisionPolicy: got an unexpected keyword argument 'param_dtype'.",),
    ),
    Mistake(
        "torch's policy",
        """
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model, optimizer, mixed_precision_policy=policy)
        """,
        TypeError,
        (
            "mixed_precision_policy: expected megatron",
            "got a torch.distributed.fsdp",
            "compute_dtype",
            "grad_comm_dtype",
        ),
    ),
    Mistake(
        "float16 and bfloat16 together",
        "MixedPrecisionPolicy(main_grads_dtype=torch.float16, grad_comm_dtype=torch.bfloat16)",
        ValueError,
        ("main_grads_dtype is torch.float16 and grad_comm_dtype is torch.bfloat16", "Expected one 16-bit format"),
    ),
    Mistake(
        "A device where a bool is expected",
        'fully_shard(model, optimizer, offload_optimizer="cpu")',
        TypeError,
        ("offload_optimizer: expected bool; got 'cpu'",),
    ),
    Mistake(
        "No unsharded unit",
        "fully_shard(model, optimizer, max_unsharded_units=0)",
        ValueError,
        ("max_unsharded_units: expected at least 1; got 0",),
    ),
    Mistake(
        "A percentage as a fraction",
        "fully_shard(model, optimizer, offload_optimizer=True, offload_fraction=50)",
        ValueError,
        ("offload_fraction: expected a number from 0 to 1; got 50",),
    ),
    Mistake(
        "An unknown granularity",
        'fully_shard(model, optimizer, shard_granularity="rows")',
        ValueError,
        ("shard_granularity: expected row", "got 'rows'"),
    ),
    Mistake(
        "Averages from gloo",
        "fully_shard(model, optimizer, average_in_collective=True)",
        ValueError,
        ("average_in_collective: gloo can sum only. Leave it off",),
    ),
    Mistake(
        "Averages, and the sums that per-token losses need",
        "fully_shard(model, optimizer, average_in_collective=True, calculate_per_token_loss=True)",
        ValueError,
        ("average_in_collective", "calculate_per_token_loss"),
    ),
    Mistake(
        "NCCL's buffers on a CPU",
        "fully_shard(model, optimizer, nccl_ub=True)",
        ValueError,
        ("nccl_ub: expected a CUDA device; there is none. Leave it off on a CPU.",),
    ),
    Mistake(
        "A CUDA graph on a CPU",
        "fully_shard(model, optimizer, cuda_graph_mode=True)",
        ValueError,
        ("cuda_graph_mode: expected a CUDA device; there is none. Leave it off on a CPU.",),
    ),
    Mistake(
        "A device that the machine does not have",
        'fully_shard(model, optimizer, device="cuda")',
        ValueError,
        ("device: got 'cuda', but torch finds no CUDA device",),
    ),
    Mistake(
        "An axis without a mesh",
        'fully_shard(model, optimizer, dp_shard_dim="dp")',
        ValueError,
        ("device_mesh: got None", "dp_shard_dim", "Give"),
    ),
    Mistake(
        "An axis that the mesh does not have",
        """
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        fully_shard(model, optimizer, device_mesh=mesh, dp_shard_dim="dp")
        """,
        ValueError,
        ("dp_shard_dim: the mesh has no axis 'dp'; its axes are ['dp_shard']. Did you mean 'dp_shard'?",),
    ),
    Mistake(
        "A mesh of two axes, and no name",
        """
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "dp"))
        fully_shard(model, optimizer, device_mesh=mesh)
        """,
        ValueError,
        ("dp_shard_dim: expected one of the axes ['tp', 'dp'] of device_mesh; got None. Give the name",),
    ),
    Mistake(
        "One axis for two purposes",
        """
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        fully_shard(model, optimizer, device_mesh=mesh, dp_shard_dim="dp", dp_outer_dim="dp")
        """,
        ValueError,
        ("dp_shard_dim: expected another axis than dp_outer_dim and tp_dim; got 'dp'",),
    ),
    Mistake(
        "A mesh whose axis has no name",
        'model, optimizer = fully_shard(model, optimizer, device_mesh=init_device_mesh("cpu", (2,)))',
        None,
        "the only axis needs no name.",
        _CHECK,
    ),
    Mistake(
        "A process group instead of a mesh",
        "fully_shard(model, optimizer, device_mesh=dist.group.WORLD)",
        TypeError,
        ("device_mesh: expected torch.distributed.device_mesh.DeviceMesh; got a torch", "init_device_mesh makes one"),
    ),
    Mistake(
        "A group of two axes, and one axis",
        """
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        fully_shard(model, optimizer, device_mesh=mesh, hybrid_fsdp_group=dist.group.WORLD)
        """,
        ValueError,
        ("hybrid_fsdp_group", "dp_outer_dim"),
    ),
    Mistake(
        "A mesh instead of an index",
        'MegatronFSDP(model, init_device_mesh("cpu", (2,)))',
        TypeError,
        ("dist_index: expected megatron_fsdp.FSDPDistributedIndex; got DeviceMesh", "Make one"),
    ),
    Mistake(
        "No process group",
        """
        dist.destroy_process_group()
        fully_shard(model, optimizer)
        """,
        RuntimeError,
        ("torch.distributed is not initialized. Call torch.distributed.init_process_group()",),
    ),
)

THEME = Theme(
    "Arguments of fully_shard",
    BUILT_MODEL,
    MISTAKES,
)
