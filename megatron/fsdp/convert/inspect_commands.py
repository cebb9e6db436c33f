"""Commands that inspect, verify, compare and copy checkpoints."""

import math
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from megatron.fsdp.checkpoint.checksums import write_file
from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.convert import verifying
from megatron.fsdp.convert.comparing import Comparison, Difference, bytes_to_compare, compare
from megatron.fsdp.convert.console import (
    as_json_text,
    console,
    directory,
    folder_of,
    gib,
    handled,
    heading,
    is_first,
    json_option,
    line,
    msc_option,
    plain,
    print_json,
    progress_bar,
    short,
    table,
    worker,
)
from megatron.fsdp.convert.inspecting import (
    GROUP_META,
    Entry,
    Summary,
    as_text,
    contents_of,
    corners,
    statistics,
    summarize,
)
from megatron.fsdp.convert.modifying import Modification, parse_operation
from megatron.fsdp.helpers.spelling import bare_name, did_you_mean

GROUP_MAP = "param_to_param_group_map.json"


@click.command("inspect")
@directory("checkpoint_dir")
@msc_option
@click.option(
    "--not-ignore-param-to-group-meta", is_flag=True, help="Also list the optimizer settings of each parameter."
)
@json_option
@handled
def inspect(checkpoint_dir: Path, not_ignore_param_to_group_meta: bool, as_json: bool) -> None:
    """List the contents of a checkpoint without reading its tensors."""
    if not is_first():
        return
    summary = summarize(folder_of(checkpoint_dir))
    shown = [e for e in summary.entries if not_ignore_param_to_group_meta or GROUP_META not in e.key]
    if as_json:
        print_json(_summary_as_json(summary, shown))
        return
    out = console()
    heading(out, "CHECKPOINT METADATA")
    line(out, f"Path: {summary.reader.path}")
    line(out, f"Format: {summary.reader.format}")
    line(out, f"Size: {gib(sum(summary.files.values()))} in {len(summary.files)} files")
    heading(out, f"COMMON STATE ({len(summary.common)} ITEMS)")
    for key, value in summary.common.items():
        line(out, f"• {key}: {short(value)}")
    _print_entries(out, summary, shown)
    heading(out, "MCORE DATA")
    if not summary.mcore_data:
        line(out, "No MCore data found in the checkpoint.")
    for key, value in summary.mcore_data.items():
        line(out, f"• {key}: {short(value)}")


def _print_entries(out: Console, summary: Summary, shown: list[Entry]) -> None:
    heading(out, "SHARDED TENSORS METADATA")
    tensors = [entry for entry in summary.entries if entry.dtype]
    size = gib(sum(entry.nbytes for entry in tensors))
    line(out, f"Total Tensors: {len(tensors)} | Total Elements: {summary.elements / 1e9:.2f}B | Total Size: {size}")
    for entry in shown:
        if entry.dtype is None:
            line(out, f"► {entry.key} [BYTES]")
        else:
            chunks = f", chunks={entry.chunks}" if entry.chunks != 1 else ""
            line(out, f"► {entry.key} [{entry.dtype}, shape={entry.shape}, {gib(entry.nbytes)}{chunks}]")
    if len(shown) < len(summary.entries):
        line(out, f"Ignored parameter-to-group metadata: {len(summary.entries) - len(shown)}", "dim")


def _summary_as_json(summary: Summary, shown: list[Entry]) -> dict[str, Any]:
    return {
        "path": str(summary.reader.path),
        "format": summary.reader.format,
        "bytes": sum(summary.files.values()),
        "files": summary.files,
        "common_state": summary.common,
        "total_tensors": sum(1 for entry in summary.entries if entry.dtype),
        "total_elements": summary.elements,
        "tensors": {
            e.key: {"dtype": str(e.dtype), "shape": e.shape, "bytes": e.nbytes, "chunks": e.chunks}
            for e in shown
            if e.dtype
        },
        "objects": [e.key for e in shown if not e.dtype],
        "ignored_param_to_group_meta": len(summary.entries) - len(shown),
        "mcore_data": summary.mcore_data or None,
    }


@click.command("print-tensor")
@directory("checkpoint_dir")
@click.argument("key")
@json_option
@handled
def print_tensor(checkpoint_dir: Path, key: str, as_json: bool) -> None:
    """Show one tensor or object."""
    if not is_first():
        return
    reader = CheckpointReader(folder_of(checkpoint_dir), verify=False)
    if key in reader.objects:
        value = reader.read_object(key)
        if as_json:
            print_json({"key": key, "object": value})
        else:
            line(console(), f"Key: {key}\nObject: {value}")
        return
    if key not in reader.tensors:
        near = did_you_mean(key, [*reader.tensors, *reader.objects])
        raise ValueError(f"{reader.path}: expected one of its keys; got {key!r}.{near}")
    tensor = reader.tensors[key]
    found, (values, cut) = statistics(tensor), corners(tensor)
    if as_json:
        print_json(
            {
                "key": key,
                "dtype": str(tensor.dtype),
                "shape": tensor.shape,
                "chunks": [chunk._asdict() for chunk in reader.chunks(key)],
                **found._asdict(),
                "values": None if any(cut) else values,
            }
        )
        return
    out = console()
    line(out, f"Key: {key}\nShape: {tensor.shape}\nDtype: {tensor.dtype}\nSize: {gib(tensor.nbytes)}")
    for chunk in reader.chunks(key):
        place = reader.place(key, chunk)
        line(out, f"Chunk: from {chunk.offsets}, shape {chunk.sizes}, in {place.file}")
    line(out, "  ".join(f"{name} {value:.6g}" for name, value in found._asdict().items()))
    line(out, as_text(values, cut))


@click.command("print-torch-dcp-in-json")
@directory("torch_dcp_dir")
@json_option
@handled
def print_torch_dcp_in_json(torch_dcp_dir: Path, as_json: bool) -> None:
    """Print the output of --dump-param-to-param-group-map, and write it into its folder as JSON.

    Parameter names become those in checkpoints, which begin with model.module.
    """
    if not is_first():
        return
    folder = folder_of(torch_dcp_dir)
    reader = CheckpointReader(folder)
    content: dict[str, Any] = {_checkpoint_name(key): reader.read_object(key) for key in reader.objects}
    content |= {_checkpoint_name(key): contents_of(tensor) for key, tensor in reader.tensors.items()}
    path = folder / GROUP_MAP
    write_file(path, as_json_text(content).encode())
    if as_json:
        print_json(content)
        return
    out = console()
    line(out, f"torch dcp content: {plain(content)}")
    line(out, f"Written to {path}.")


def _checkpoint_name(name: str) -> str:
    """The key of a parameter in a checkpoint, for its name in training."""
    return verifying.WEIGHTS + bare_name(name) if name.startswith("module.") else name


@click.command("modify-state-dict")
@directory("input_dir")
@directory("output_dir")
@click.option(
    "--op",
    "operations",
    multiple=True,
    required=True,
    help="'remove REGEX' or 'rename REGEX REPLACEMENT'. Repeat it to apply several in order.",
)
@msc_option
@json_option
@handled
def modify_state_dict(input_dir: Path, output_dir: Path, operations: tuple[str, ...], as_json: bool) -> None:
    """Copy a checkpoint, with keys removed or renamed. A REGEX matches anywhere in a key."""
    source = CheckpointReader(folder_of(input_dir))
    modification = Modification(source, [parse_operation(text) for text in operations])
    with progress_bar("Copying", modification.nbytes // worker()[1]) as progress:
        modification.write(output_dir, worker(), progress)
    if not is_first():
        return
    renaming = modification.renaming
    renamed = {key: name for key, name in renaming.kept.items() if key != name}
    if as_json:
        what = {"kept": len(renaming.kept), "removed": renaming.removed, "renamed": renamed}
        print_json({"input": str(source.path), "output": str(output_dir), "bytes": modification.nbytes, **what})
        return
    out = console()
    for key in renaming.removed:
        line(out, f"removed {key}")
    for key, name in renamed.items():
        line(out, f"renamed {key} -> {name}")
    line(
        out,
        f"Kept {len(renaming.kept)} keys, {len(renamed)} of them renamed, removed {len(renaming.removed)}; "
        f"{gib(modification.nbytes)} of tensors written to {output_dir}.",
    )


@click.command("compare-two-checkpoint")
@directory("checkpoint_1")
@directory("checkpoint_2")
@msc_option
@json_option
@handled
def compare_two_checkpoint(checkpoint_1: Path, checkpoint_2: Path, as_json: bool) -> None:
    """Show keys that only one checkpoint has, and tensors that are not close. The exit status is always 0."""
    if not is_first():
        return
    found = _compared(checkpoint_1, checkpoint_2)
    unlike = [d for d in found.tensors if not d.alike]
    if as_json:
        print_json({**_keys_as_json(found), "different_tensors": [_difference_as_json(d) for d in unlike]})
        return
    out = console()
    _print_keys(out, found)
    heading(out, f"TENSORS THAT DIFFER ({len(unlike)} OF {len(found.tensors)})")
    for d in unlike:
        line(out, f"► {d.key}: {_in_words(d)}")


@click.command("diff")
@directory("checkpoint_1")
@directory("checkpoint_2")
@click.option("--all", "show_all", is_flag=True, help="Also show tensors that are equal.")
@click.option("--exit-code", is_flag=True, help="Exit with status 1 if anything differs.")
@msc_option
@json_option
@handled
def diff(checkpoint_1: Path, checkpoint_2: Path, show_all: bool, exit_code: bool, as_json: bool) -> None:
    """Show keys, shapes and dtypes that differ, and by how much the elements of each tensor differ."""
    if not is_first():
        return
    found = _compared(checkpoint_1, checkpoint_2)
    shown = [d for d in found.tensors if show_all or not d.same]
    if as_json:
        tensors = [_difference_as_json(d) for d in shown]
        same = sum(d.same for d in found.tensors)
        print_json({"same": found.same, **_keys_as_json(found), "tensors": tensors, "same_tensors": same})
    else:
        _print_diff(found, shown)
    if exit_code and not found.same:
        click.get_current_context().exit(1)


def _compared(first: Path, second: Path) -> Comparison:
    a, b = CheckpointReader(folder_of(first)), CheckpointReader(folder_of(second))
    with progress_bar("Comparing", bytes_to_compare(a, b)) as progress:
        return compare(a, b, progress)


def _keys_as_json(found: Comparison) -> dict[str, Any]:
    return {
        "only_in_1": found.only_first,
        "only_in_2": found.only_second,
        "tensor_in_one_only": found.kinds,
        "different_objects": found.objects,
    }


def _difference_as_json(d: Difference) -> dict[str, Any]:
    numbers = {"different_elements": d.elements, "max_absolute": d.absolute, "max_relative": d.relative}
    if d.elements is None:
        numbers = dict.fromkeys(numbers)
    return {"key": d.key, "shapes": d.shapes, "dtypes": [str(t) for t in d.dtypes], "close": d.close, **numbers}


def _print_keys(out: Console, found: Comparison) -> None:
    sections = {
        "KEYS IN THE FIRST ONLY": found.only_first,
        "KEYS IN THE SECOND ONLY": found.only_second,
        "KEYS OF A TENSOR IN ONE, OF AN OBJECT IN THE OTHER": found.kinds,
        "OBJECTS THAT DIFFER": found.objects,
    }
    for title, keys in sections.items():
        heading(out, f"{title} ({len(keys)})")
        for key in keys:
            line(out, f"► {key}")


def _in_words(d: Difference) -> str:
    if d.elements is None:
        return f"shape {d.shapes[0]} and {d.shapes[1]}"
    dtypes = f"{d.dtypes[0]} and {d.dtypes[1]}, " if d.dtypes[0] != d.dtypes[1] else ""
    count = math.prod(d.shapes[0])
    return f"{dtypes}{d.elements} of {count} elements differ, by {d.absolute:.3g} at most, relative {d.relative:.3g}"


def _print_diff(found: Comparison, shown: list[Difference]) -> None:
    out = console()
    _print_keys(out, found)
    title = f"Tensors ({len(shown)} of {len(found.tensors)})"
    rows = table(title, "key", "shape", "dtype", ">differing", ">max abs", ">max rel")
    for d in shown:
        shape, dtype = _either(*d.shapes), _either(*(str(t).removeprefix("torch.") for t in d.dtypes))
        if d.elements is None:
            rows.add_row(d.key, shape, dtype, "-", "-", "-")
        else:
            rows.add_row(d.key, shape, dtype, f"{d.elements:,}", f"{d.absolute:.3g}", f"{d.relative:.3g}")
    if shown:
        out.print(rows)
    line(out, f"{sum(d.same for d in found.tensors)} of {len(found.tensors)} tensors are the same.")


def _either(first: object, second: object) -> str:
    return str(first) if first == second else f"{first} | {second}"


@click.command("verify")
@directory("checkpoint_dir")
@msc_option
@json_option
@handled
def verify(checkpoint_dir: Path, as_json: bool) -> None:
    """Check all files, tensors and objects of a checkpoint. The exit status is 1 if there is a problem."""
    if not is_first():
        return
    folder = folder_of(checkpoint_dir)
    with progress_bar("Verifying", verifying.bytes_to_verify(folder)) as progress:
        report = verifying.verify(folder, progress)
    sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else 0 for name in report.files}
    if as_json:
        files = {name: {"bytes": sizes[name], "problem": text or None} for name, text in report.files.items()}
        print_json({"path": str(folder), "whole": not report.problems, **report._asdict(), "files": files})
    else:
        out = console()
        rows = table("", "file", ">size", "state")
        for name, text in report.files.items():
            rows.add_row(name, gib(sizes[name]), "DAMAGED" if text else "whole")
        out.print(rows)
        for problem in report.problems:
            line(out, f"► {problem}", "red")
        for name in report.unused:
            line(out, f"{name} belongs to no tensor or object.", "dim")
        result = f"{len(report.problems)} problems" if report.problems else "whole"
        what = f"{report.tensors} tensors, {report.objects} objects, checked by {report.checked_by or 'nothing'}"
        line(out, f"{folder}: {what}: {result}.")
    if report.problems:
        click.get_current_context().exit(1)


COMMANDS: tuple[click.Command, ...] = (
    inspect,
    print_tensor,
    print_torch_dcp_in_json,
    modify_state_dict,
    compare_two_checkpoint,
    verify,
    diff,
)
