"""Commands that inspect, verify, compare and copy checkpoints."""

from pathlib import Path
from typing import Any

import click

from megatron.fsdp.checkpoint.checksums import write_file
from megatron.fsdp.checkpoint.reader import CheckpointReader, checkpoint_folder
from megatron.fsdp.checkpoint.writer import write_checkpoint
from megatron.fsdp.convert import verifying
from megatron.fsdp.convert.comparing import bytes_to_compare, compare
from megatron.fsdp.convert.console import Result, as_json_text, command, directory, gib, plain, progress_bar, worker
from megatron.fsdp.convert.inspecting import as_text, contents_of, corners, countable, statistics, summarize
from megatron.fsdp.convert.modifying import modified, parse_operation
from megatron.fsdp.helpers.spelling import bare_name, did_you_mean

GROUP_MAP = "param_to_param_group_map.json"


@command("inspect")
@directory("checkpoint_dir")
@click.option(
    "--not-ignore-param-to-group-meta",
    "with_groups",
    is_flag=True,
    help="Also list the optimizer settings of each parameter.",
)
def inspect(checkpoint_dir: Path, with_groups: bool) -> Result:
    """List the contents of a checkpoint without reading its tensors."""
    found = summarize(checkpoint_folder(checkpoint_dir), with_groups)
    tensors = []
    for key, tensor in found["tensors"].items():
        chunks = f", chunks={tensor['chunks']}" if tensor["chunks"] != 1 else ""
        tensors.append(f"{key} [{tensor['dtype']}, shape={tensor['shape']}, {gib(tensor['bytes'])}{chunks}]")
    return Result(found, found | {"files": len(found["files"]), "tensors": tensors})


@command("print-tensor")
@directory("checkpoint_dir")
@click.argument("key")
def print_tensor(checkpoint_dir: Path, key: str) -> Result:
    """Show one tensor or object."""
    reader = CheckpointReader(checkpoint_folder(checkpoint_dir), verify=False)
    if key in reader.objects:
        value = reader.read_object(key)
        return Result({"key": key, "object": value}, {"key": key, "object": str(value)})
    if key not in reader.tensors:
        near = did_you_mean(key, [*reader.tensors, *reader.objects])
        raise ValueError(f"{reader.path}: expected one of its keys; got {key!r}.{near}")
    tensor = reader.tensors[key]
    values, cut = corners(countable(tensor))
    facts = {"key": key, "dtype": str(tensor.dtype), "shape": tensor.shape, **statistics(countable(tensor))._asdict()}
    places = [(chunk, reader.place(key, chunk).file) for chunk in reader.chunks(key)]
    return Result(
        facts | {"chunks": [chunk._asdict() for chunk, _ in places], "values": None if any(cut) else values},
        facts | {"bytes": tensor.nbytes, "chunks": [f"{c.offsets}, shape={c.sizes}, in {file}" for c, file in places]},
        end=as_text(values, cut),
    )


@command("print-torch-dcp-in-json")
@directory("torch_dcp_dir")
def print_torch_dcp_in_json(torch_dcp_dir: Path) -> Result:
    """Print the output of --dump-param-to-param-group-map, and write it into its folder as JSON.

    Parameter names become those in checkpoints, which begin with model.module.
    """
    folder = checkpoint_folder(torch_dcp_dir)
    reader = CheckpointReader(folder)
    content: dict[str, Any] = {_checkpoint_name(key): reader.read_object(key) for key in reader.objects}
    content |= {_checkpoint_name(key): contents_of(tensor) for key, tensor in reader.tensors.items()}
    path = folder / GROUP_MAP
    write_file(path, as_json_text(content).encode())
    return Result(content, {"torch dcp content": str(plain(content)), "written to": path})


def _checkpoint_name(name: str) -> str:
    """The key of a parameter in a checkpoint, for its name in training."""
    return verifying.WEIGHTS + bare_name(name) if name.startswith("module.") else name


@command("modify-state-dict", divided=True)
@directory("input_dir")
@directory("output_dir")
@click.option(
    "--op",
    "operations",
    multiple=True,
    required=True,
    help="'remove REGEX' or 'rename REGEX REPLACEMENT'. Repeat it to apply several in order.",
)
def modify_state_dict(input_dir: Path, output_dir: Path, operations: tuple[str, ...]) -> Result:
    """Copy a checkpoint, with keys removed or renamed. A REGEX matches anywhere in a key."""
    source = CheckpointReader(checkpoint_folder(input_dir))
    process, processes = worker()
    draft, (kept, removed) = modified(source, [parse_operation(text) for text in operations], contents=process == 0)
    identity = f"{source.fingerprint} {operations}"
    with progress_bar("Copying", draft.nbytes // processes) as progress:
        write_checkpoint(draft, output_dir, (process, processes), source=identity, progress=progress)
    facts = {"input": str(source.path), "output": str(output_dir), "bytes": draft.nbytes, "kept": len(kept)}
    return Result(facts | {"removed": removed, "renamed": {key: name for key, name in kept.items() if key != name}})


@command("diff")
@directory("checkpoint_1")
@directory("checkpoint_2")
@click.option("--all", "show_all", is_flag=True, help="Also show tensors that are equal.")
@click.option("--exit-code", is_flag=True, help="Exit with status 1 if anything differs.")
def diff(checkpoint_1: Path, checkpoint_2: Path, show_all: bool, exit_code: bool) -> Result:
    """Show keys, shapes and dtypes that differ, and by how much the elements of each tensor differ.

    Tensors are close if their elements are, as in torch.allclose.
    """
    first, second = (CheckpointReader(checkpoint_folder(path)) for path in (checkpoint_1, checkpoint_2))
    with progress_bar("Comparing", bytes_to_compare(first, second)) as progress:
        found = compare(first, second, progress)
    shown = [d for d in found.tensors if show_all or not d.same]
    facts = {
        "same": found.same,
        "only_in_1": found.only_first,
        "only_in_2": found.only_second,
        "tensor_in_one_only": found.kinds,
        "different_objects": found.objects,
        "tensors": [str(d) for d in shown],
    }
    count = sum(d.same for d in found.tensors)
    tensors = {"tensors": [d.facts for d in shown], "different_tensors": [d.facts for d in shown if not d.alike]}
    return Result(
        facts | tensors | {"same_tensors": count},
        facts,
        end=f"{count} of {len(found.tensors)} tensors are the same.",
        failed=exit_code and not found.same,
    )


@command("verify")
@directory("checkpoint_dir")
def verify(checkpoint_dir: Path) -> Result:
    """Check all files, tensors and objects of a checkpoint. The exit status is 1 if there is a problem."""
    folder = checkpoint_folder(checkpoint_dir)
    with progress_bar("Verifying", verifying.bytes_to_verify(folder)) as progress:
        report = verifying.verify(folder, progress)
    sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else 0 for name in report.files}
    problems = report.problems
    files = {name: {"bytes": sizes[name], "problem": text or None} for name, text in report.files.items()}
    states = {name: f"{'DAMAGED' if text else 'complete'}, {gib(sizes[name])}" for name, text in report.files.items()}
    what = f"{report.tensors} tensors, {report.objects} objects, checked by {report.checked_by or 'nothing'}"
    return Result(
        {"path": str(folder), "complete": not problems, **report._asdict(), "files": files},
        {"files": states, "files of no tensor or object": report.unused, "problems": problems},
        end=f"{folder}: {what}: {f'{len(problems)} problems' if problems else 'complete'}.",
        failed=bool(problems),
    )


COMMANDS: tuple[click.Command, ...] = (inspect, print_tensor, print_torch_dcp_in_json, modify_state_dict, diff, verify)
