"""Further conditions for mistakes, besides those of README.md, by title."""

_TRAINS = "assert_trains(model, optimizer)"
_ONE_LIST = f"{_TRAINS}; assert len(model.engine.units) == 4"
_NO_WEIGHTS = "assert abs(loss_of(model, tokens_of()).item() - math.log(31)) < 1e-5"
_AFTER_ONE_STEP = "assert_same_weights(model, unsharded(1))"
_FOREVER = ("They first differ at number", "Every rank must run the same")

# Where a mistake works: code that runs after it. Others train as an unsharded model does.
CHECKS: dict[str, str] = {
    "A class instead of a list of classes": _ONE_LIST,
    "A name instead of a list of names": _ONE_LIST,
    "A copy of a model before it is sharded": f"{_TRAINS}; loss_of(average, tokens_of())",
    "The inner model instead of the sharded one": (
        "train(model.module, optimizer); assert_same_weights(model, unsharded())"
    ),
    "A full tensor as .data": _NO_WEIGHTS,
    "Values written in place": _NO_WEIGHTS,
    "Initialization after sharding": """
torch.manual_seed(7)
nn.init.xavier_uniform_(model.module.head.weight)
torch.manual_seed(7)
assert torch.equal(model.module.head.weight.full_tensor(), nn.init.xavier_uniform_(torch.empty(31, 13)))
""",
    "No zero_grad": "assert_same_weights(model, unsharded(zero_grad=False))",
    "Two forwards before one backward": _AFTER_ONE_STEP,
    "A step after a backward in no_sync": _AFTER_ONE_STEP,
    "Parameters that a batch does not use": ("assert all(p.grad is None for p in model.module.blocks[2].parameters())"),
    "Clipping by torch's functions": """
norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
assert torch.allclose(norm, largest_gradient(), rtol=1e-4)
assert all(p.grad.full_tensor().abs().max() <= 1.001e-3 for p in model.parameters())
""",
    "Another seed": """
torch.manual_seed(0)
first = Model()
assert_same_weights(model, first)
train(model, optimizer)
assert_same_weights(model, unsharded(start=first.state_dict()))
""",
    "torch.save of the state dict on every rank": "assert_same_weights(model, unsharded())",
    "torch.save of the optimizer": """
loaded = torch.load(f"{folder}/{rank}.pt", weights_only=False)
state, found = (each.state_dict()["state"] for each in (optimizer, loaded))
assert all(torch.equal(found[number]["exp_avg"], value["exp_avg"]) for number, value in state.items())
""",
    "fully_shard of the whole model only": """
train(model, optimizer)
for name, weight in unsharded().named_parameters():
    torch.testing.assert_close(model.get_parameter(name).full_tensor(), weight, rtol=2e-5, atol=2e-5)
""",
    "A layer instead of a list of layers": "forward_backward(model, tokens(0, 1))",
}
# The ranks that raise, where the others end without an error.
ON: dict[str, tuple[int, ...]] = {
    "Parameters frozen on one rank, after sharding": (1,),
    "More batches on one rank": (1,),
}
# Where ranks raise different messages: what each of these has.
PARTS: dict[str, tuple[str, ...]] = {
    "A wrong argument on one rank": ("fsdp_unit_modules",),
    "An exception that one rank catches": _FOREVER,
    "Evaluation on one rank": _FOREVER,
    "A norm read on one rank": _FOREVER,
    "Saving on one rank": _FOREVER,
    "More batches on one rank": ("rank 0", "at the end of the data"),
    "torch.save on rank 0, and its file on all ranks": (
        "expected this rank's shard",
        "got another rank's",
        "torch.distributed.checkpoint",
    ),
    "A rank that is later than the limit": ("Positions of the ranks:", "rank 1 issued fewer", "Every rank must"),
}
# The messages of torch itself, which differ between its versions.
OF_TORCH = {
    "FSDP2 inside",
    "A second backward of the same loss",
    "Input of a different dtype than the model",
    "State from an optimizer of another model",
    "A checkpoint that does not exist",
    "A checkpoint that was not written to its end",
    "The checkpoint of another model",
    "A file of torch.save as a checkpoint's folder",
    "The checkpoint of a model of a different size",
}
