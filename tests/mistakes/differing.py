"""Mistakes by which ranks differ from each other: none of them may leave the others waiting."""

from tests.mistakes.case import Mistake, Theme

_SHARD = "model, optimizer = fully_shard(model, adamw(model.parameters()), fsdp_unit_modules=[Block])"
_DIFFER = "The ranks that shard this model differ. First difference: "
_FOREVER = ("The ranks have issued different operations", "They first differ at number", "Every rank must run the same")

MISTAKES = (
    Mistake(
        "Another width",
        "model = Model(width=13 + rank)\n" + _SHARD,
        ValueError,
        (_DIFFER + "parameter embedding.weight: rank 0: shape (31, 13)", "Build the same model"),
    ),
    Mistake(
        "Another depth",
        "model = Model(depth=3 + rank)\n" + _SHARD,
        ValueError,
        (
            _DIFFER + "parameter blocks.3.norm.weight: rank 0: does not exist; rank 1: shape (13,)",
            "Build the same model",
        ),
    ),
    Mistake(
        "Another dtype",
        "model = Model().to(torch.bfloat16 if rank == 1 else torch.float32)\n" + _SHARD,
        ValueError,
        (_DIFFER + "parameter embedding.weight: rank 0: shape (31, 13), torch.float32", "Build the same model"),
    ),
    Mistake(
        "Another seed",
        "torch.manual_seed(rank)\nmodel = Model()\n" + _SHARD,
        None,
        "every shard has the values that its rank built, as with FSDP2; where shards are replicated, the first rank's.",
        "start = main_weights(model)\ntrain(model, optimizer)\nassert_same_weights(model, unsharded(start=start))",
    ),
    Mistake(
        "Another strategy",
        "model = fully_shard_model(Model(), zero_dp_strategy=3 - rank)",
        ValueError,
        (
            _DIFFER + "setting zero_dp_strategy: rank 0: optim_grads_params; rank 1: optim_grads",
            "Give all ranks the same",
        ),
    ),
    Mistake(
        "Other units",
        "model = fully_shard_model(Model(), fsdp_unit_modules=[Block] if rank == 0 else [nn.Linear])",
        ValueError,
        (_DIFFER, "Build the same model"),
    ),
    Mistake(
        "A wrong argument on one rank",
        "model = fully_shard_model(Model(), fsdp_unit_modules=[Block] if rank == 0 else 3)",
        (TypeError, ValueError),
        ("fsdp_unit_modules",),
    ),
    Mistake(
        "Parameters frozen on one rank, before sharding",
        "model = Model()\nmodel.head.weight.requires_grad_(rank == 0)\n" + _SHARD,
        ValueError,
        (_DIFFER + "parameter head.weight: rank 0: shape (31, 13), torch.float32, trained", "frozen"),
    ),
    Mistake(
        "Parameters frozen on one rank, after sharding",
        "model = Model()\n"
        + _SHARD
        + "\nmodel.module.head.weight.requires_grad_(rank == 0)\nloss_of(model, tokens_of()).backward()",
        RuntimeError,
        ("requires_grad of head.weight is False on this rank, but another rank has a gradient", "Freeze the same"),
        on=(1,),
    ),
    Mistake(
        "An exception that one rank catches",
        "model = Model()\n"
        + _SHARD
        + """
for step in range(3):
    try:
        loss = loss_of(model, tokens_of(step))
        if rank == 1 and step == 1:
            raise MemoryError
        loss.backward()
        optimizer.step()
    except MemoryError:
        optimizer.zero_grad()
""",
        RuntimeError,
        _FOREVER,
    ),
    Mistake(
        "Evaluation on one rank",
        "model = Model()\n"
        + _SHARD
        + """
if rank == 0:
    with torch.no_grad():
        model(tokens_of())
train(model, optimizer)
""",
        RuntimeError,
        _FOREVER,
    ),
    Mistake(
        "Saving on one rank",
        "model = Model()\n"
        + _SHARD
        + """
train(model, optimizer)
if rank == 0:
    options = dcp.state_dict.StateDictOptions(full_state_dict=True)
    torch.save(dcp.state_dict.get_model_state_dict(model, options=options), io.BytesIO())
train(model, optimizer)
""",
        RuntimeError,
        _FOREVER,
    ),
    Mistake(
        "More batches on one rank",
        "model = Model()\n" + _SHARD + "\ntrain(model, optimizer, steps=2 + rank)\ndist.destroy_process_group()",
        RuntimeError,
        ("Communication with other ranks has failed.", "rank 0", "at the end of the data"),
        on=(1,),
    ),
    Mistake(
        "A rank that is later than the limit",
        """
dist.destroy_process_group()
dist.init_process_group("gloo", f"file://{folder}/store", timeout=timedelta(seconds=3), rank=rank, world_size=2)
model = fully_shard_model(Model(), fsdp_unit_modules=[Block])
if rank == 1:
    time.sleep(6)
model(tokens_of())
""",
        RuntimeError,
        (
            "Communication with other ranks has failed.",
            "Positions of the ranks:",
            "rank 1 issued fewer",
            "Every rank must",
        ),
    ),
)

THEME = Theme("Ranks that differ", "", MISTAKES)
