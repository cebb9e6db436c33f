"""Mistakes with the model: before it is sharded, and what is done to it afterwards."""

from tests.mistakes.case import BUILT_MODEL, SHARDED_MODEL, Mistake, Theme

_CHECK = "assert_trains(model, optimizer)"
_ALONE = (
    "on the sharded parameter",
    "in the forward of the sharded model: call that",
    "register_forward_method(module",
)
_BEFORE_SHARDING = "Tie, parametrize, prune and normalize weights before the model is sharded."
_STAYS = ("The model is sharded: its parameters stay torch.float32 on cpu", "before sharding it")

_BEFORE = (
    Mistake(
        "A model on the meta device",
        """
        with torch.device("meta"):
            model = Model()
        fully_shard_model(model, fsdp_unit_modules=[Block])
        """,
        ValueError,
        ("Parameter embedding.weight is on the meta device", "init_model_with_meta_device=True"),
    ),
    Mistake(
        "A module on the meta device that cannot initialize itself",
        """
        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.factor = nn.Parameter(torch.ones(3, device="meta"))

        fully_shard_model(nn.Sequential(Scale()), init_model_with_meta_device=True)
        """,
        ValueError,
        (
            "init_model_with_meta_device: 0 (Scale) has factor on the meta device and no method reset_parameters",
            "Add one",
        ),
    ),
    Mistake(
        "A model that has not got its shapes yet",
        "fully_shard_model(nn.Sequential(nn.LazyLinear(4)))",
        ValueError,
        ("Parameter 0.weight", "which has no shape yet. Run the model once before it is sharded."),
    ),
    Mistake(
        "A sparse parameter",
        "fully_shard_model(nn.ParameterList([nn.Parameter(torch.eye(3).to_sparse())]))",
        NotImplementedError,
        ("Parameter 0 has the layout torch.sparse_coo: only strided ones are supported.",),
    ),
    Mistake(
        "Parameters of integers",
        "fully_shard_model(nn.ParameterList([nn.Parameter(torch.arange(3), requires_grad=False)]))",
        ValueError,
        ("Parameter 0: expected one of the dtypes torch.float64", "got torch.int64", "buffer"),
    ),
    Mistake(
        "A list of parameters as a unit",
        """
        model.scales = nn.ParameterList([nn.Parameter(torch.ones(13))])
        fully_shard_model(model, fsdp_unit_modules=[nn.ParameterList])
        """,
        ValueError,
        ("fsdp_unit_modules: ParameterList has no forward. Give the class whose forward reads scales.",),
    ),
    Mistake(
        "DDP inside",
        "fully_shard_model(DistributedDataParallel(model), fsdp_unit_modules=[Block])",
        ValueError,
        ("The model cannot be sharded: it is already synchronized by", "DistributedDataParallel", "(its .module)"),
    ),
    Mistake(
        "FSDP2 inside",
        """
        for block in model.blocks:
            torch.distributed.fsdp.fully_shard(block)
        fully_shard_model(model, fsdp_unit_modules=[Block])
        """,
        ValueError,
        (
            "The model cannot be sharded: its module blocks.0 is already synchronized by",
            "Leave out torch's fully_shard",
        ),
    ),
    Mistake(
        "A copy of a model before it is sharded",
        """
        average = copy.deepcopy(model)
        model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[Block])
        """,
        None,
        "the copy is a model of its own.",
        _CHECK + "; loss_of(average, tokens_of())",
    ),
    Mistake(
        "A method registered before the model is sharded",
        'register_forward_method(model, "forward")',
        ValueError,
        ("register_forward_method: expected a module of a sharded model; got a TinyModel", "Shard the model first."),
    ),
    Mistake(
        "Deferred initialization of a model that is built",
        "deferred_init(Model())",
        TypeError,
        ("deferred_init: expected a class, or a function", "got a tests.models.TinyModel"),
    ),
)

_AFTER = (
    Mistake(
        "Sharding twice",
        "fully_shard(model, optimizer, fsdp_unit_modules=[Block])",
        ValueError,
        (
            "The model is already wrapped: parameter module.embedding.weight belongs to a MegatronFSDP",
            "Call fully_shard once",
        ),
    ),
    Mistake(
        "Sharding the inner model again",
        "fully_shard_model(model.module, fsdp_unit_modules=[Block])",
        ValueError,
        ("The model is already wrapped: parameter embedding.weight belongs to a MegatronFSDP", "Call fully_shard once"),
    ),
    Mistake(
        "The inner model instead of the sharded one",
        "model.module(tokens_of())",
        None,
        "the model that was given to fully_shard is sharded itself.",
        "train(model.module, optimizer); assert_same_weights(model, unsharded())",
    ),
    Mistake("A unit alone", "model.module.blocks[0](torch.randn(2, 13))", None, "a unit unshards itself.", _CHECK),
    Mistake("An embedding alone", "model.module.embedding(tokens_of())", NotImplementedError, _ALONE),
    Mistake("A head alone", "model.module.head(torch.randn(2, 13))", NotImplementedError, _ALONE),
    Mistake(
        "forward of a unit instead of the unit",
        "model.module.blocks[0].forward(torch.randn(2, 13))",
        NotImplementedError,
        ("on the sharded parameter blocks.0.norm.weight", "modules as block(x), not block.forward(x)"),
    ),
    Mistake(
        "A unit whose parameters another module reads",
        """
        attention = nn.MultiheadAttention(8, 2)
        attention = fully_shard_model(attention, fsdp_unit_modules=[nn.Linear])
        attention(*[torch.randn(3, 1, 8)] * 3)
        """,
        NotImplementedError,
        ("on the sharded parameter out_proj.weight", "give its class in fsdp_unit_modules, not the other's"),
    ),
    Mistake(
        "A method other than forward",
        """
        def encode(model, tokens):
            return model.blocks[0](model.embedding(tokens))

        Model.encode = encode
        model.module.encode(tokens_of())
        """,
        NotImplementedError,
        _ALONE,
    ),
    Mistake(
        "A method other than forward, registered",
        """
        Model.encode = lambda model, tokens: model.blocks[0](model.embedding(tokens))
        register_forward_method(model, "encode")
        model.encode(tokens_of())
        """,
        None,
        "the method runs with whole parameters.",
        _CHECK,
    ),
    Mistake(
        "A method that does not exist",
        'register_forward_method(model, "forwrad")',
        ValueError,
        ("register_forward_method: TinyModel has no method 'forwrad'. Did you mean 'forward'?",),
    ),
    Mistake("Another dtype after sharding", "model.to(torch.bfloat16)", NotImplementedError, _STAYS),
    Mistake("half() after sharding", "model.half()", NotImplementedError, _STAYS),
    Mistake("half() of the inner model", "model.module.half()", NotImplementedError, _STAYS),
    Mistake("A move to where the model is", 'model.to("cpu")', None, "nothing is moved.", _CHECK),
    Mistake(
        "A copy of a sharded model",
        "copy.deepcopy(model)",
        NotImplementedError,
        ("A sharded model cannot be copied.", "state_dict()"),
    ),
    Mistake(
        "A pickle of a sharded model",
        "torch.save(model, io.BytesIO())",
        NotImplementedError,
        ("A sharded model cannot be pickled. Save its state with torch.distributed.checkpoint.save",),
    ),
    Mistake(
        "A parameter that is replaced",
        "model.module.head.weight = nn.Parameter(torch.zeros(31, 13))",
        RuntimeError,
        (
            "Linear.weight is sharded: a parameter that replaces it would be neither sharded nor trained.",
            "copy_(value)",
        ),
    ),
    Mistake(
        "A new module",
        "model.module.extra = nn.Linear(2, 2)",
        RuntimeError,
        ("parameters of a new module 'extra'", "Add modules, such as adapters, before the model is sharded."),
    ),
    Mistake(
        "A whole tensor as .data",
        "model.module.head.weight.data = torch.zeros(31, 13)",
        None,
        "the values are copied into the shards.",
        "assert abs(loss_of(model, tokens_of()).item() - math.log(31)) < 1e-5",
    ),
    Mistake(
        "Values written in place",
        """
        with torch.no_grad():
            model.module.head.weight.zero_()
        """,
        None,
        "the next forward uses the new values.",
        "assert abs(loss_of(model, tokens_of()).item() - math.log(31)) < 1e-5",
    ),
    Mistake(
        "Elements of a parameter",
        "model.module.head.weight[0]",
        NotImplementedError,
        ("on the sharded parameter head.weight: Use .full_tensor()", "p.copy_(full tensor)"),
    ),
    Mistake(
        "All parameters as one vector",
        "nn.utils.parameters_to_vector(model.parameters())",
        NotImplementedError,
        ("on the sharded parameter embedding.weight: shards have other shapes. Use .full_tensor()",),
    ),
    Mistake(
        "The norm of each row",
        "model.module.head.weight.detach().norm(dim=1)",
        NotImplementedError,
        ("on a sharded tensor: it reduces dimensions [1] only. Use .full_tensor()",),
    ),
    Mistake(
        "A loss between two parameters",
        "nn.functional.mse_loss(model.module.head.weight, model.module.embedding.weight)",
        NotImplementedError,
        ("on the sharded parameter head.weight: use element-wise operations, such as (p - q).square().mean().",),
    ),
    Mistake(
        "numpy() of a parameter",
        "model.module.head.weight.detach().numpy()",
        RuntimeError,
        ("numpy(), tolist(), storage() and safetensors' save_file need the memory of a full tensor",),
    ),
    Mistake(
        "A collective on a parameter",
        "dist.broadcast(model.module.head.weight.detach(), 0)",
        NotImplementedError,
        ("every rank has another shard, and gradients are averaged over the ranks already. Use .full_tensor()",),
    ),
    Mistake(
        "eye_ after sharding",
        "nn.init.eye_(model.module.head.weight)",
        NotImplementedError,
        ("on the sharded parameter head.weight: initialize a plain tensor of its shape", "p.copy_(that)"),
    ),
    Mistake(
        "Tying after sharding",
        "model.module.head.weight = model.module.embedding.weight",
        RuntimeError,
        ("Linear.weight would be a parameter that is sharded in another place", _BEFORE_SHARDING),
    ),
    Mistake(
        "A parametrization after sharding",
        'nn.utils.parametrize.register_parametrization(model.module.head, "weight", nn.Identity())',
        NotImplementedError,
        ("on the sharded parameter head.weight: shards have other shapes", _BEFORE_SHARDING),
    ),
    Mistake(
        "Pruning after sharding",
        """
        from torch.nn.utils import prune

        prune.l1_unstructured(model.module.head, "weight", 0.5)
        """,
        RuntimeError,
        ("Linear.weight_orig would be a parameter that is sharded in another place", _BEFORE_SHARDING),
    ),
    Mistake(
        "Spectral norm after sharding",
        "nn.utils.spectral_norm(model.module.head)",
        NotImplementedError,
        ("on the sharded parameter head.weight: shards have other shapes", _BEFORE_SHARDING),
    ),
    Mistake(
        "vmap",
        "torch.func.vmap(model)(tokens_of())",
        NotImplementedError,
        ("FSDP unit <root>: torch.func (vmap, grad, jvp, jacrev) does not work", "a loop in place of vmap"),
    ),
    Mistake(
        "Initialization after sharding",
        "nn.init.xavier_uniform_(model.module.head.weight)",
        None,
        "every rank initializes its shard, with the variance of the whole tensor.",
        "assert abs(model.module.head.weight.full_tensor().std().item() - (2 / 44) ** 0.5) < 0.02",
    ),
    Mistake(
        "register_buffers without nccl_ub",
        "model.register_buffers()",
        RuntimeError,
        ("register_buffers: expected nccl_ub=True",),
    ),
)

THEME = Theme(
    "The model, before it is sharded",
    BUILT_MODEL,
    _BEFORE,
)
SHARDED = Theme(
    "The model, after it is sharded",
    SHARDED_MODEL,
    _AFTER,
)
