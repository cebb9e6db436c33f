"""Mistakes with Megatron-Core."""

from tests.mistakes.case import Mistake, Theme

_WRAP = "model = FullyShardedDataParallel(config, ddp_config(), gpt(config))\n"

MISTAKES = (
    Mistake(
        "An unknown data_parallel_sharding_strategy",
        'FullyShardedDataParallel(config, ddp_config("zero3"), gpt(config))',
        ValueError,
        ("data_parallel_sharding_strategy: expected 0 or 'no_shard'", "got 'zero3'. Use 'optim_grads_params'."),
    ),
    Mistake(
        "A Megatron model that is wrapped twice",
        _WRAP + "FullyShardedDataParallel(config, ddp_config(), model)",
        ValueError,
        ("The model is already wrapped", "Call fully_shard once"),
    ),
    Mistake(
        "Megatron's DDP inside",
        """
        model = DistributedDataParallel(config, ddp_config(None), gpt(config))
        FullyShardedDataParallel(config, ddp_config(), model)
        """,
        ValueError,
        ("The model cannot be sharded: it is already synchronized by", "(its .module)"),
    ),
    Mistake(
        "A layer that the Megatron model does not have",
        "FullyShardedDataParallel(config, ddp_config(), gpt(config), fsdp_unit_modules=[torch.nn.Conv2d])",
        ValueError,
        ("fsdp_unit_modules: the model has no Conv2d. It has:",),
    ),
    Mistake(
        "A layer instead of a list of layers",
        "model = FullyShardedDataParallel(config, ddp_config(), gpt(config), fsdp_unit_modules=torch.nn.LayerNorm)",
        None,
        "a single class is a list of one.",
        "forward_backward(model, tokens(0, 1))",
    ),
    Mistake(
        "Several optimizer instances without their group",
        "FullyShardedDataParallel(config, ddp_config(num_distributed_optimizer_instances=2), gpt(config))",
        ValueError,
        ("num_distributed_optimizer_instances is 2: expected a group inter_dist_opt",),
    ),
    Mistake(
        "sharded_state_dict",
        _WRAP + "model.sharded_state_dict()",
        NotImplementedError,
        ("sharded_state_dict() would describe", "ckpt_format fsdp_dtensor"),
    ),
    Mistake(
        "Whole gradients",
        _WRAP + "model.finish_grad_sync(force_all_reduce=True)",
        NotImplementedError,
        ("finish_grad_sync(force_all_reduce=True): gradients stay sharded.",),
    ),
    Mistake(
        "--optimizer sgd",
        'check_flags(optimizer="sgd", ckpt_format="fsdp_dtensor")',
        (ValueError, NotImplementedError),
        ("optimizer other than adam and muon:",),
    ),
    Mistake(
        "--optimizer-offload-fraction 50",
        'check_flags(optimizer_offload_fraction=50, ckpt_format="fsdp_dtensor")',
        (ValueError, NotImplementedError),
        ("optimizer_offload_fraction below 0 or above 1:",),
    ),
    Mistake(
        "A name of NVIDIA's package that has no equivalent",
        "from megatron_fsdp.utils import get_te_version",
        ImportError,
        ("megatron_fsdp.utils.get_te_version does not exist here: use megatron.core.utils.get_te_version",),
    ),
)

THEME = Theme("Megatron-Core", "config = transformer_config()", MISTAKES, names="tests.mistakes.megatron_names")
