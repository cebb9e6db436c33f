"""Mistakes with state dicts and checkpoints."""

from torch.distributed.checkpoint import CheckpointException as _FAILED

from tests.mistakes.case import SHARDED_MODEL, Mistake, Theme

_CHECK = "assert_trains(model, optimizer)"

MISTAKES = (
    Mistake(
        "A tensor of another shape",
        'model.load_state_dict({**Model().state_dict(), "head.weight": torch.zeros(3, 3)})',
        ValueError,
        ("head.weight: expected shape (31, 13); got (3, 3).", "Give the state of a model of the same sizes."),
    ),
    Mistake(
        "A misspelled key",
        """
        state = Model().state_dict()
        state["haed.weight"] = state.pop("head.weight")
        model.load_state_dict(state)
        """,
        RuntimeError,
        ("state_dict does not fit the model. Missing: ", "head.weight", "Unexpected: ", "Did you mean", "strict=False"),
    ),
    Mistake(
        "The state of another model",
        "model.load_state_dict(nn.Linear(3, 3).state_dict())",
        RuntimeError,
        (
            "state_dict does not fit the model. Missing: ",
            "and 14 more",
            "Unexpected: ",
            "Give the state of the same model",
        ),
    ),
    Mistake(
        "The state of the unsharded model",
        "torch.manual_seed(0)\nmodel.load_state_dict(Model().state_dict())",
        None,
        "whole tensors are divided between the ranks.",
        _CHECK,
    ),
    Mistake(
        'The state of a wrapped model, whose keys begin with "module."',
        """
        torch.manual_seed(0)
        model.load_state_dict({f"module.{key}": value for key, value in Model().state_dict().items()})
        """,
        None,
        "keys with and without the prefix fit.",
        _CHECK,
    ),
    Mistake(
        "assign=True",
        "model.load_state_dict(Model().state_dict(), assign=True)",
        ValueError,
        ("load_state_dict: assign=True would replace the main weights; expected assign=False.",),
    ),
    Mistake(
        "A checkpoint's path instead of a state dict",
        'model.load_state_dict("checkpoint.pt")',
        TypeError,
        ("state_dict: expected collections.abc.Mapping; got 'checkpoint.pt'",),
    ),
    Mistake(
        "torch.save of the state dict on every rank",
        """
        train(model, optimizer)
        torch.save(model.state_dict(), f"{folder}/{rank}.pt")
        model = fully_shard_model(Model(), fsdp_unit_modules=[Block])
        model.load_state_dict(torch.load(f"{folder}/{rank}.pt", weights_only=False))
        """,
        None,
        "a run with the same number of ranks can load its files.",
        "assert_same_weights(model, unsharded())",
    ),
    Mistake(
        "torch.save on rank 0, and its file on all ranks",
        """
        torch.save(model.state_dict(), f"{folder}/{rank}.pt")
        dist.barrier()
        model.load_state_dict(torch.load(f"{folder}/0.pt", weights_only=False))
        """,
        ValueError,
        ("expected this rank's shard", "got another rank's", "torch.distributed.checkpoint"),
    ),
    Mistake(
        "torch.save of the optimizer",
        """
        train(model, optimizer)
        torch.save(optimizer, f"{folder}/{rank}.pt")
        """,
        None,
        "as without sharding, the file has an optimizer of copies: it is read for its state.",
        """
        loaded = torch.load(f"{folder}/{rank}.pt", weights_only=False)
        state, found = (each.state_dict()["state"] for each in (optimizer, loaded))
        assert all(torch.equal(found[number]["exp_avg"], value["exp_avg"]) for number, value in state.items())
        """,
    ),
    Mistake(
        "safetensors' save_file",
        """
        from safetensors.torch import save_file

        save_file(model.state_dict(), f"{folder}/{rank}.safetensors")
        """,
        RuntimeError,
        ("safetensors' save_file need the memory of a full tensor", "megatron_fsdp.save_safetensors(model, folder)"),
    ),
    Mistake(
        "A checkpoint that does not exist",
        'dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder}/step_10")',
        _FAILED,
        ("folder/step_10/.metadata",),
    ),
    Mistake(
        "A checkpoint that was not written to its end",
        """
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/step_10")
        if rank == 0:
            os.remove(f"{folder}/step_10/.metadata")
        dist.barrier()
        dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder}/step_10")
        """,
        _FAILED,
        ("folder/step_10/.metadata",),
    ),
    Mistake(
        "The checkpoint of another model",
        """
        dcp.save({"model": nn.Linear(3, 3).state_dict()}, checkpoint_id=f"{folder}/step_10")
        dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder}/step_10")
        """,
        _FAILED,
        ("Missing key in checkpoint state_dict: model.module.embedding.weight",),
    ),
    Mistake(
        "A file of torch.save as a checkpoint's folder",
        """
        torch.save(Model().state_dict(), f"{folder}/model.pt")
        dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder}/model.pt")
        """,
        _FAILED,
        ("folder/model.pt/.metadata",),
    ),
    Mistake(
        "The checkpoint of a model of another size",
        """
        dcp.save({"model": fully_shard_model(Model(width=7)).state_dict()}, checkpoint_id=f"{folder}/step_10")
        dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder}/step_10")
        """,
        _FAILED,
        ("Size mismatch between saved",),
    ),
    Mistake(
        "safetensors in a file instead of a folder",
        """
        open(f"{folder}/model.safetensors", "w").close()
        megatron_fsdp.save_safetensors(model, f"{folder}/model.safetensors")
        """,
        (FileExistsError, NotADirectoryError, ValueError),
        ("model.safetensors",),
    ),
)

THEME = Theme(
    "State dicts and checkpoints",
    SHARDED_MODEL,
    MISTAKES,
)
