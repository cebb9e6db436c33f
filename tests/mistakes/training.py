"""Mistakes in the training loop."""

from tests.mistakes.case import SHARDED_MODEL, Mistake, Theme

_CHECK = "assert_trains(model, optimizer)"

MISTAKES = (
    Mistake(
        "No zero_grad",
        """
        for step in range(2):
            loss_of(model, tokens_of(step)).backward()
            optimizer.step()
        """,
        None,
        "gradients add up, as without sharding.",
        "assert_same_weights(model, unsharded(zero_grad=False))",
    ),
    Mistake(
        "A second backward of the same loss",
        """
        loss = loss_of(model, tokens_of())
        loss.backward()
        loss.backward()
        """,
        RuntimeError,
        ("Trying to backward through the graph a second time",),
    ),
    Mistake(
        "Two forwards before one backward",
        """
        loss = (loss_of(model, tokens_of()) + loss_of(model, tokens_of())) / 2
        loss.backward()
        optimizer.step()
        """,
        None,
        "the gradients of both count.",
        "assert_same_weights(model, unsharded(1))",
    ),
    Mistake(
        "A step after a backward in no_sync",
        """
        with model.no_sync():
            loss_of(model, tokens_of()).backward()
        optimizer.step()
        """,
        None,
        "the step synchronizes gradients first.",
        "assert_same_weights(model, unsharded(1))",
    ),
    Mistake(
        "An exception that all ranks catch",
        """
        try:
            loss_of(model, tokens_of())
            raise RuntimeError("made up")
        except RuntimeError:
            optimizer.zero_grad()
        """,
        None,
        "the next forward starts over.",
        _CHECK,
    ),
    Mistake(
        "Parameters that a batch does not use",
        """
        model.module.blocks[2].forward = lambda x: x
        loss_of(model, tokens_of()).backward()
        optimizer.step()
        """,
        None,
        "they get no gradient, as without sharding.",
        "assert all(p.grad is None for p in model.module.blocks[2].parameters())",
    ),
    Mistake(
        "A forward without backward before training",
        "loss_of(model, tokens_of())",
        None,
        "its units are resharded by the next forward.",
        _CHECK,
    ),
    Mistake(
        "Clipping by torch's functions",
        """
        loss_of(model, tokens_of()).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        """,
        None,
        "norms are those of whole gradients, on every rank.",
        """
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        assert torch.allclose(norm, largest_gradient(), rtol=1e-4)
        assert all(p.grad.full_tensor().abs().max() <= 1.001e-3 for p in model.parameters())
        """,
    ),
    Mistake(
        "A parameter group that is added later",
        """
        scale = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [scale]})
        """,
        None,
        "parameters outside of the model are updated by each rank for itself.",
        _CHECK,
    ),
    Mistake(
        "Input of another dtype than the model",
        """
        model = fully_shard_model(Block(4).bfloat16(), fsdp_unit_modules=[])
        model(torch.ones(2, 4))
        """,
        RuntimeError,
        ("mixed dtype",),
    ),
    Mistake(
        "A loss that is not a number",
        """
        model = fully_shard_model(Model(), fsdp_unit_modules=[Block], report_nan_in_param_grad=True)
        (loss_of(model, tokens_of()) * float("nan")).backward()
        """,
        RuntimeError,
        ("The gradient of blocks.2.", "has NaN on this rank, before it is reduced"),
    ),
    Mistake(
        "A whole gradient that is set by hand",
        """
        for parameter in model.parameters():
            parameter.grad = torch.zeros(parameter.shape)
        optimizer.step()
        """,
        TypeError,
        ("expected a sharded tensor (a DTensor), such as torch.zeros_like(parameter); got Tensor",),
    ),
    Mistake(
        "A gradient hook that returns another tensor",
        """
        model.module.head.weight.register_hook(lambda gradient: torch.zeros(3))
        loss_of(model, tokens_of()).backward()
        """,
        ValueError,
        ("A gradient hook of head.weight returned a Tensor of shape (3,): expected a DTensor",),
    ),
    Mistake(
        "A gradient hook with a mask of the full shape",
        """
        mask = torch.ones(31, 13)
        model.module.head.weight.register_hook(lambda gradient: gradient * mask)
        """,
        None,
        "each rank takes its part of the mask.",
        _CHECK,
    ),
    Mistake(
        "A hook of several gradients",
        "torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), print)",
        NotImplementedError,
        ("on the sharded parameter embedding.weight", "use register_post_accumulate_grad_hook of each parameter"),
    ),
    Mistake(
        "Sparse gradients",
        """
        torch.manual_seed(0)
        model = Model()
        model.embedding.sparse = True
        model, optimizer = fully_shard(model, adamw(model.parameters()), fsdp_unit_modules=[Block])
        """,
        None,
        "they are dense after backward, as the buffers that they are reduced in.",
        _CHECK,
    ),
    Mistake(
        "A forward without a process group",
        """
        tokens = tokens_of()
        dist.destroy_process_group()
        model(tokens)
        """,
        RuntimeError,
        ("torch.distributed is not initialized. Call torch.distributed.init_process_group()",),
    ),
)

THEME = Theme(
    "The training loop",
    SHARDED_MODEL,
    MISTAKES,
)
