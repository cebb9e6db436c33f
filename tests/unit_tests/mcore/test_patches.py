"""The tables of patches: every name exists, is replaced and put back, and was checked with the installed version."""

import ast
import importlib
import inspect
import pkgutil
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.fsdp.helpers import patches as helper
from megatron.fsdp.helpers.patches import MEGATRON_CORE, Kind, Patch, Patches, Versions
from megatron.fsdp.mcore import install, is_installed, uninstall
from megatron.fsdp.mcore.patches import MEGATRON, MEGATRON_BRIDGE
from scripts import patch_table

ROOT = Path(__file__).resolve().parents[3]
TABLES = helper.tables()
ROWS = [(table, row) for table in TABLES for row in table.rows]
IDS = [row.target for _, row in ROWS]
HERE = Versions("torch", ("2",))

# Patches of Megatron on a CPU are installed when its modules are imported.
for _, _row_of_megatron in ROWS:
    if _row_of_megatron.versions is MEGATRON_CORE:
        importlib.import_module(_row_of_megatron.module)


def current(row: Patch) -> object:
    """The object that has the name, without binding: a static method is returned as such."""
    return vars(row.owner).get(row.attribute, getattr(row.owner, row.attribute))


# Not those of the CPU, which later tests need.
TABLES_OF_RUNS = ("megatron.fsdp.dtensor.torch_patches:TORCH", "megatron.fsdp.mcore.patches:MEGATRON")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    with mock.patch.object(helper, "TABLES", TABLES_OF_RUNS):
        helper.uninstall_all()  # earlier tests may have sharded a model
    before = {row: current(row) for _, row in ROWS if row.applies}
    yield
    uninstall()
    for row, value in before.items():
        assert current(row) is value


@pytest.mark.parametrize(("table", "row"), ROWS, ids=IDS)
def test_every_name_is_replaced_and_put_back(table: Patches, row: Patch) -> None:
    if not row.applies:
        pytest.skip("the package is not installed, or its version lacks the name")
    alone = Patches("one row", [row])
    original, seen = current(row), getattr(row.owner, row.attribute)
    alone.install()
    replaced = getattr(row.owner, row.attribute)
    # A value that is installed for as long as Megatron runs on the CPU has been put there already.
    assert alone.is_installed and (replaced is not seen or (table.is_installed and row.kind is Kind.VALUE))
    if row.kind is Kind.AROUND:
        assert replaced.__wrapped__ is not None and replaced.__name__ == seen.__name__
    alone.install()
    assert getattr(row.owner, row.attribute) is replaced, "a second installation changes nothing"
    alone.uninstall()
    assert current(row) is original and not alone.is_installed


@pytest.mark.parametrize(("table", "row"), ROWS, ids=IDS)
def test_every_patch_has_a_reason_and_checked_versions(table: Patches, row: Patch) -> None:
    assert len(row.reason) > 10 and not row.reason.endswith(".")
    assert callable(pkgutil.resolve_name(row.replacement))
    version = row.versions.installed
    assert version is None or row.versions.cover(version), f"{row.target} was checked with {row.versions}"


def test_all_patches_apply_to_the_installed_versions() -> None:
    assert [problem for table in TABLES for row in table.rows if row.applies and (problem := row.problem())] == []


def test_a_table_patches_no_name_twice() -> None:
    for table in TABLES:
        targets = [row.target for row in table.rows]
        assert len(set(targets)) == len(targets)


def test_every_table_is_listed() -> None:
    """A table is made at the top of a module, and nowhere else."""
    found = set()
    for path in (ROOT / "megatron" / "fsdp").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                if getattr(node.value.func, "id", "") == "Patches":
                    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                    found.add(f"{module}:{node.targets[0].id}")
    assert found == set(helper.TABLES)


def test_the_tool_prints_every_name() -> None:
    printed = patch_table.as_markdown()
    assert all(f"`{row.target}`" in printed for table in TABLES for row in table.rows)


def test_uninstalling_restores_all_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "TABLES", TABLES_OF_RUNS)
    before = {row: current(row) for table in helper.tables() for row in table.rows if row.applies}
    for table in helper.tables():
        table.install()
    assert all(current(row) is not value for row, value in before.items())
    helper.uninstall_all()
    assert all(current(row) is value for row, value in before.items())


# Megatron's ------------------------------------------------------------------------------------------------------


def test_wrappers_are_ours() -> None:
    install()
    assert is_installed()
    from megatron.core.distributed import FullyShardedDataParallel
    from megatron.fsdp.mcore import FullyShardedDataParallel as ours
    from megatron.training.models import dist_utils
    from megatron.training.training import megatron_FSDP

    assert FullyShardedDataParallel is ours and megatron_FSDP is ours and dist_utils.FullyShardedDataParallel is ours
    uninstall()
    assert not is_installed()


def test_names_of_the_original_are_ours_after_install() -> None:
    install()
    import megatron.core.distributed.fsdp.src.megatron_fsdp as package
    import megatron_fsdp
    from megatron.core.distributed.fsdp import FullyShardedDataParallel
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel as wrapper
    from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP, fully_shard
    from megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard import fully_shard_model
    from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP as same
    from megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision import MixedPrecisionPolicy
    from megatron.fsdp import mcore

    assert FullyShardedDataParallel is wrapper is mcore.FullyShardedDataParallel
    assert MegatronFSDP is same is megatron_fsdp.MegatronFSDP
    assert fully_shard is megatron_fsdp.fully_shard and fully_shard_model is megatron_fsdp.fully_shard_model
    assert MixedPrecisionPolicy is megatron_fsdp.MixedPrecisionPolicy
    # Scripts import from the submodule as well, which imports these names itself.
    theirs, here = (importlib.import_module(f"{name}.fully_shard") for name in (package.__name__, "megatron_fsdp"))
    for name in set(here.__all__) - {"ShardingStrategy"}:
        assert getattr(theirs, name) is getattr(here, name) is getattr(megatron_fsdp, name)
    behaviour = [name for name in package.__all__ if not name.startswith("__") and not name.endswith("Config")]
    assert behaviour and all(getattr(package, name) is getattr(megatron_fsdp, name) for name in behaviour)


def test_what_was_imported_before_install_raises_an_error() -> None:
    """Megatron-Core's wrapper and its fully_shard() construct this class."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP

    before = MegatronFSDP.__init__
    install()
    with pytest.raises(RuntimeError, match="imported before"):
        MegatronFSDP(torch.nn.Linear(2, 2))
    assert inspect.unwrap(MegatronFSDP.__init__) is before
    uninstall()
    assert MegatronFSDP.__init__ is before


def test_a_mock_of_the_wrapper() -> None:
    def mock() -> None: ...

    install(mock)
    from megatron.core.distributed import FullyShardedDataParallel

    assert FullyShardedDataParallel is mock


def test_a_megatron_that_lacks_a_name_is_refused_and_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import distributed

    original = distributed.FullyShardedDataParallel
    gone = replace(MEGATRON.rows[-1], target="megatron.core.distributed:no_such_function", optional=False)
    monkeypatch.setattr(MEGATRON, "rows", (*MEGATRON.rows, gone))
    with pytest.raises(ImportError, match=r"has no no_such_function, .*installed: "):
        install()
    assert not is_installed() and distributed.FullyShardedDataParallel is original


def test_a_module_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = replace(MEGATRON.rows[0], target="megatron.no_such_module:name")
    monkeypatch.setattr(MEGATRON, "rows", (gone,))
    with pytest.raises(
        ImportError, match=r"needs megatron-core\[training\]. .*cannot import megatron.no_such_module:name .*0\.19\.2"
    ):
        install()


BRIDGE = {
    "setup": "from megatron.core.distributed import FullyShardedDataParallel as megatron_FSDP",
    "checkpointing": """import torch
def generate_state_dict(): return "theirs"
def preprocess_fsdp_dtensor_state_dict(): return "theirs"
def apply_peft_adapter_filter_to_state_dict(): return "theirs"
SEEN_WHILE_IMPORTING = generate_state_dict()
""",
}


@pytest.fixture
def bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with the names of Megatron-Bridge that are replaced; the function imports one of its modules."""
    folder = tmp_path / "megatron" / "bridge" / "training"
    folder.mkdir(parents=True)
    for name, text in BRIDGE.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda name: importlib.import_module(f"megatron.bridge.training.{name}")
    uninstall()
    for name in [name for name in sys.modules if name.startswith("megatron.bridge")]:
        del sys.modules[name]
    del sys.modules["megatron"].bridge


def test_an_untried_version_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from megatron.core import package_info

    helper.warn_if_untried.cache_clear()
    install()
    assert not caplog.records, "the version of the tests was tried"
    monkeypatch.setattr(package_info, "__version__", "0.19.9")
    install()
    install()
    said = "Megatron-FSDP was not tested with megatron-core 0.19.9. It was tested with megatron-core 0.18.2, "
    assert [record.getMessage().startswith(said) for record in caplog.records] == [True]


@pytest.mark.parametrize("first", [True, False], ids=["imported before install()", "imported after install()"])
def test_megatron_bridge_is_patched(bridge: Any, first: bool) -> None:
    if first:
        modules = [bridge(name) for name in BRIDGE]
        install()
    else:
        install()
        modules = [bridge(name) for name in BRIDGE]
    rows = [row for row in MEGATRON.rows if row.versions is MEGATRON_BRIDGE and row.applies]
    assert {row.module for row in rows} == {module.__name__ for module in modules}
    replaced = {row: current(row) for row in rows}
    assert modules[1].SEEN_WHILE_IMPORTING == "theirs" and hasattr(modules[1].generate_state_dict, "__wrapped__")
    uninstall()
    assert modules[1].generate_state_dict() == "theirs"
    assert all(current(row) is not value for row, value in replaced.items())


def test_nothing_is_patched_after_uninstall(bridge: Any) -> None:
    finders = list(sys.meta_path)
    install()
    install()
    assert len(sys.meta_path) == len(finders) + 1
    uninstall()
    assert sys.meta_path == finders
    assert bridge("checkpointing").generate_state_dict() == "theirs" and not is_installed()


def test_a_mock_reaches_modules_that_are_imported_later(bridge: Any) -> None:
    def mock() -> None: ...

    install(mock)
    assert bridge("setup").megatron_FSDP is mock


def test_importing_a_module_that_lacks_a_name_raises_an_error(bridge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = replace(MEGATRON.rows[-1], target="megatron.bridge.training.checkpointing:no_such_function")
    monkeypatch.setattr(MEGATRON, "rows", (*MEGATRON.rows, gone))
    install()
    with pytest.raises(ImportError, match="has no no_such_function"):
        bridge("checkpointing")


# The type of a table ---------------------------------------------------------------------------------------------


class Base:
    def inherited(self) -> str:
        return "base"

    @staticmethod
    def static(value: int) -> int:
        return value


class Derived(Base):
    pass


def louder(original: Any, self: Any) -> str:
    return str(original(self)).upper()


def doubled(original: Any, value: int) -> int:
    return 2 * int(original(value))


def _row(target: str, replacement: str, **options: Any) -> Patch:
    return Patch(f"{__name__}:{target}", "is an example", f"{__name__}:{replacement}", HERE, **options)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or inspect.getmodule(Base))


def test_uninstalling_an_inherited_method_removes_it_from_the_class(importable: None) -> None:
    table = Patches("example", [_row("Derived.inherited", "louder")])
    with table.installed():
        assert Derived().inherited() == "BASE" and Base().inherited() == "base"
        with table.installed():
            pass
        assert Derived().inherited() == "BASE", "the outer block puts the original back"
    assert "inherited" not in vars(Derived)


def test_a_static_method_stays_static(importable: None) -> None:
    before = vars(Base)["static"]
    table = Patches("example", [_row("Base.static", "doubled")])
    table.install()
    assert Base.static(3) == 6
    table.uninstall()
    assert vars(Base)["static"] is before and Base().static(3) == 3


@pytest.mark.parametrize(("installed", "wanted"), [("0.18.9", "old"), ("0.19", "both"), ("0.20.0+abc1234", "new")])
def test_a_patch_of_a_name_that_not_all_versions_have(
    importable: None, monkeypatch: pytest.MonkeyPatch, installed: str, wanted: str
) -> None:
    module = types.ModuleType("a_package_info")
    module.__version__ = installed
    monkeypatch.setitem(sys.modules, "a_package_info", module)
    versions = Versions("a-package", ("0.19",), "a_package_info")
    names = {"old": {"before": "0.19"}, "both": {"since": "0.19", "before": "0.20"}, "new": {"since": "0.20"}}
    rows = {
        name: replace(_row("Base.inherited" if name == wanted else "Base.gone", "louder", **bounds), versions=versions)
        for name, bounds in names.items()
    }
    assert [name for name, row in rows.items() if row.applies] == [wanted]
    table = Patches("example", rows.values())
    with table.installed():
        assert Base().inherited() == "BASE"
    assert versions.cover(installed) == (installed == "0.19")


def test_the_version_of_a_checkout_hides_that_of_the_installed_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import package_info

    monkeypatch.setattr(package_info, "__version__", "99.0")
    assert MEGATRON_CORE.installed == "99.0" and not MEGATRON_CORE.cover("99.0")


def test_versions() -> None:
    checked = Versions("torch", ("2.11", "2.13"))
    assert checked.cover("2.11.0") and checked.cover("2.13.1+cpu") and checked.cover("2.11")
    assert not checked.cover("2.1") and not checked.cover("2.12.0") and not checked.cover("2.110")
    assert Versions("no-such-distribution").installed is None
