"""Lightning's private names: each is used in one folder only, and here is what fails when one goes away."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import lightning_resilience
from lightning_resilience._lightning import lightning_data
from lightning_resilience._lightning.lightning_patches import Patches

PACKAGE = Path(lightning_resilience.__file__).parent
HOME = sorted((PACKAGE / "_lightning").glob("*.py"))
FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
PACKAGES = list(FABRIC)

NAMES: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "Trainer": (
        lambda t: t,
        {"_accelerator_connector", "_checkpoint_connector", "_data_connector", "_logger_connector", "_signal_connector"}
        | {"_run", "_teardown"}
        | {"barebones", "callbacks", "fast_dev_run", "fit_loop"},
    ),
    "source of training data": (lambda t: t.fit_loop._data_source, {"dataloader"}),
    "checkpoint connector": (
        lambda t: t._checkpoint_connector,
        {"_ckpt_path", "_hpc_resume_path", "_loaded_checkpoint", "_restore_modules_and_callbacks"}
        | {"dump_checkpoint", "restore_callbacks", "restore_datamodule", "restore_model", "resume_start"}
        | {"restore_training_state", "resume_end"},
    ),
    "checkpoints": (
        lambda t: importlib.import_module(f"{package_of(t)}.callbacks").ModelCheckpoint,
        {"_find_last_checkpoints"},
    ),
    "signal connector": (lambda t: t._signal_connector, {"_original_handlers", "register_signal_handlers", "teardown"}),
    "prediction loop": (lambda t: t.predict_loop, {"_predict_step"}),
    "accelerator connector": (lambda t: t._accelerator_connector, {"cluster_environment", "use_distributed_sampler"}),
    "data connector": (lambda t: t._data_connector, {"_prepare_dataloader"}),
    "its module": (
        lambda t: importlib.import_module(type(t._data_connector).__module__),
        {"_auto_add_worker_init_fn", "_get_distributed_sampler", "_update_dataloader"},
    ),
    "automatic optimization": (
        lambda t: t.fit_loop.epoch_loop.automatic_optimization,
        {"_make_closure", "_on_before_zero_grad", "_optimizer_zero_grad", "_training_step", "optim_progress"},
    ),
    "its closure": (
        lambda t: importlib.import_module(f"{package_of(t)}.loops.optimization.automatic").Closure(lambda: None),
        {"_backward_fn", "_step_fn", "_zero_grad_fn"},
    ),
    "logger connector": (
        lambda t: t._logger_connector,
        {"_callback_metrics", "_current_fx", "_first_loop_iter", "_logged_metrics", "_progress_bar_metrics"},
    ),
    "fit loop": (
        lambda t: t.fit_loop,
        {"_combined_loader", "_combined_loader_states_to_load", "_data_fetcher", "_data_source"}
        | {"_last_train_dl_reload_epoch"}
        | {
            "_load_combined_loader_states",
            "_restarting",
            "_resuming_from_checkpoint",
            "_skip_backward",
            "epoch_loop",
            "epoch_progress",
            "is_resuming",
            "run",
        },
    ),
    "epoch loop": (
        lambda t: t.fit_loop.epoch_loop,
        {"_broadcast_sigterm_tensor", "_on_after_fetch", "_restarting", "_results", "_should_accumulate"}
        | {"_batches_that_stepped", "_num_ready_batches_reached", "_skip_next_val", "update_lr_schedulers"}
        | {"advance", "automatic_optimization", "batch_progress", "manual_optimization", "on_run_start", "reset"}
        | {"scheduler_progress", "val_loop"},
    ),
    "manual optimization": (lambda t: t.fit_loop.epoch_loop.manual_optimization, {"optim_step_progress"}),
    "validation loop": (
        lambda t: t.fit_loop.epoch_loop.val_loop,
        {"_combined_loader", "_data_fetcher", "_evaluation_step", "_last_val_dl_reload_epoch", "_restarting"}
        | {"batch_progress", "on_run_end", "reset", "run", "state_dict"},
    ),
    "StochasticWeightAveraging's hooks": (
        lambda t: importlib.import_module(f"{package_of(t)}.callbacks").StochasticWeightAveraging(0.1),
        {"on_train_epoch_start", "update_parameters"},
    ),
    "EarlyStopping": (
        lambda t: importlib.import_module(f"{package_of(t)}.callbacks").EarlyStopping("loss"),
        {"patience", "state_key", "wait_count"},
    ),
    "epoch progress": (lambda t: t.fit_loop.epoch_progress.current, {"processed"}),
    "its progress": (lambda t: t.fit_loop.epoch_loop.batch_progress, {"increment_processed"}),
    "batch progress": (lambda t: t.fit_loop.epoch_loop.batch_progress.current, {"completed", "ready"}),
    "combined loader": (
        lambda t: t.fit_loop._combined_loader,
        {"_iterator", "_load_state_dicts", "_state_dicts", "flattened"},
    ),
    "data fetcher": (
        lambda t: importlib.import_module(f"{package_of(t)}.loops.fetchers")._PrefetchDataFetcher(),
        {"done", "fetched", "length", "teardown"},
    ),
    "logged values": (lambda t: t.fit_loop.epoch_loop._results, {"batch", "batch_size"}),
    "logged value": (
        lambda t: next(iter(t.fit_loop.epoch_loop._results.values())),
        {"_forward_cache", "_update_count", "cumulated_batch_size", "has_reset", "is_tensor", "meta", "value"},
    ),
    "module of the results": (
        lambda t: importlib.import_module(type(t.fit_loop.epoch_loop._results).__module__),
        {"_Metadata", "_ResultMetric", "_Sync"},
    ),
    "Lightning's ways to fetch": (
        lambda t: importlib.import_module(f"{package_of(t)}.loops.fetchers"),
        {"_DataLoaderIterDataFetcher", "_PrefetchDataFetcher"},
    ),
    "combined loader's iterator": (lambda t: combined_iterator(package_of(t)), {"_idx", "iterators"}),
    "torch's data-loader iterator": (
        lambda t: combined_iterator(package_of(t)).iterators[0],
        {"_next_index", "_num_yielded"},
    ),
    "torch's data-loader iterator with workers": (
        lambda t: importlib.import_module("torch.utils.data.dataloader")._MultiProcessingDataLoaderIter(
            torch.utils.data.DataLoader([1], num_workers=1)
        ),
        {
            *("_next_index", "_num_workers", "_num_yielded", "_rcvd_idx", "_send_idx", "_try_put_index"),
            "_worker_queue_idx_cycle",
        },
    ),
    "torch's data loader": (lambda t: DataLoader([1]), {"_get_iterator"}),
    "torch's data loaders": (
        lambda t: importlib.import_module("torch.utils.data.dataloader"),
        {"_MultiProcessingDataLoaderIter"},
    ),
    "sync of a logged value": (
        lambda t: next(iter(t.fit_loop.epoch_loop._results.values())).meta.sync,
        {"_should", "group", "rank_zero_only", "should"},
    ),
    "launchers": (
        lambda t: importlib.import_module(f"{package_of(t)}.strategies.launchers.multiprocessing"),
        {"_MultiProcessingLauncher"},
    ),
    "ModelCheckpoint": (
        lambda t: t.checkpoint_callback,
        {"_defer_save_until_validation", "_last_checkpoint_saved", "_last_global_step_saved", "_link_checkpoint"}
        | {"_train_time_interval", "FILE_EXTENSION", "file_exists"},
    ),
    "LearningRateFinder": (
        lambda t: importlib.import_module(f"{package_of(t)}.callbacks").LearningRateFinder(),
        {"_attr_name", "_early_exit", "_update_attr"},
    ),
    "BatchSizeFinder": (
        lambda t: importlib.import_module(f"{package_of(t)}.callbacks").BatchSizeFinder(),
        {"_batch_arg_name", "optimal_batch_size"},
    ),
    "module of hooks": (lambda t: importlib.import_module(f"{package_of(t)}.trainer.call"), {"_call_setup_hook"}),
    "module of parsing": (
        lambda t: importlib.import_module(f"{package_of(t)}.utilities.parsing"),
        {"lightning_getattr", "lightning_hasattr", "lightning_setattr"},
    ),
    "CSVLogger": (
        lambda t: importlib.import_module(f"{package_of(t)}.loggers").CSVLogger("."),
        {"_experiment", "_root_dir", "_save_dir", "_version"},
    ),
    "its writer": (
        lambda t: importlib.import_module(f"{package_of(t)}.loggers.csv_logs").ExperimentWriter,
        {"_check_log_dir_exists", "_rewrite_with_new_header"},
    ),
    "TensorBoard's writer": (
        lambda t: pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError).SummaryWriter,
        {"_get_file_writer"},
    ),
    "WeightAveraging": (
        lambda t: importlib.import_module(f"{package_of(t)}.callbacks").WeightAveraging(),
        {"_average_model", "_latest_update_step"},
    ),
    "StochasticWeightAveraging": (
        lambda t: importlib.import_module(f"{package_of(t)}.callbacks").StochasticWeightAveraging(0.1),
        {"_average_model"},
    ),
    "ModelPruning": (
        lambda t: importlib.import_module(f"{package_of(t)}.callbacks").ModelPruning("l1_unstructured"),
        {"_make_pruning_permanent", "_original_layers", "_parameters_to_prune"},
    ),
    "Timer": (lambda t: importlib.import_module(f"{package_of(t)}.callbacks").Timer(), {"_duration"}),
    "module of FSDPStrategy": (
        lambda t: importlib.import_module(f"{package_of(t)}.strategies.fsdp"),
        {"_lazy_load"},
    ),
    "FSDPStrategy": (
        lambda t: importlib.import_module(f"{package_of(t)}.strategies").FSDPStrategy(),
        {"_state_dict_type"},
    ),
    "DDPStrategy": (
        lambda t: importlib.import_module(f"{package_of(t)}.strategies").DDPStrategy(),
        {"_ddp_comm_hook", "_ddp_kwargs", "_forward_redirection", "_model_averager", "_timeout"},
    ),
    "torch's DDP": (
        lambda t: SimpleNamespace(
            **dict.fromkeys(re.findall(r"self\.(\w+)", inspect.getsource(DistributedDataParallel.__init__)))
        ),
        {"_comm_hooks"},
    ),
    "ModelParallelStrategy": (
        lambda t: importlib.import_module(f"{package_of(t)}.strategies").ModelParallelStrategy(),
        {"_data_parallel_size", "_device_mesh", "_tensor_parallel_size"},
    ),
    "AsyncCheckpointIO": (
        lambda t: async_checkpoint_io(package_of(t)),
        {"_checkpoint_io", "_ensure_setup", "_error", "_executor", "checkpoint_io"},
    ),
    "LightningModule": (
        lambda t: t.lightning_module,
        {"CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_NAME", "CHECKPOINT_HYPER_PARAMS_TYPE"}
        | {"_metric_attributes", "_on_before_batch_transfer"},
    ),
    "torch.nn.Module": (lambda t: torch.nn.Linear(1, 1), {"_buffers"}),
    "torchmetrics.Metric": (
        lambda t: torchmetrics.MeanMetric(),
        {"_computed", "_defaults", "_reductions", "_update_count"},
    ),
    "a running metric": (lambda t: torchmetrics.aggregation.RunningMean(2), {"_num_vals_seen"}),
}

CLASSES = [  # recognised by these names
    ("{package}.strategies.model_parallel", "ModelParallelStrategy"),
    ("{package}.strategies.fsdp", "FSDPStrategy"),
    ("{package}.callbacks.model_checkpoint", "ModelCheckpoint"),
    ("{package}.plugins.io.async_plugin", "AsyncCheckpointIO"),
    ("{fabric}.plugins.io.torch_io", "TorchCheckpointIO"),
    ("{fabric}.plugins.environments.torchelastic", "TorchElasticEnvironment"),
]

NOT_LIGHTNING = {
    "_cdata",  # torch: tells two storages apart that have no address
    "_world",  # torch.distributed: its process groups, and how many there were
    "_version",  # torch: how often a tensor was written
    "_values",  # torch: the numbers that a sparse tensor stores
    "_foreach_norm",  # torch: many tensors at once, as clip_grad_norm_ does it
    "_foreach_copy_",
    "_amp_foreach_non_finite_check_and_unscale_",  # torch: with which a GradScaler looks at gradients
    "_buffers",  # torch: of a module, by their names
    "_step_supports_amp_scaling",  # torch: by which a GradScaler knows an optimizer that skips steps on its device
    "_broadcast_coalesced",  # torch.distributed: what DDP waits for in the forward pass
    "_reduce_scatter_base",  # torch.distributed: a collective, in the evidence of hangs
    "_C",
    "_current_frames",  # sys: where each thread is, as it documents
    "_current_graph_task_id",  # torch: whether this thread computes a backward pass
    "_execution_engine",  # torch.autograd: what FSDP2 asks, too, to be called at the end of a backward pass
    "_get_layout",  # torch: named in pickles of DCP
    "_actions",  # argparse: the options of a parser
    "_launch_ended",  # a file of nemo_run.py
    "_injected",  # our callbacks: whether the launch has added it
    "_asdict",  # of a NamedTuple
    "_inst",  # random: the generator behind its functions
    "_rand",  # numpy.random: the same
    "_exit",  # os: ends the process at once
    "_shutdown",  # threading: waits for threads that are no daemons, as the end of Python does
    "_run_exitfuncs",  # atexit: what the end of Python calls
    "_data",  # os.environ: the dictionary behind it
    "_popen",  # torch's and NVRx's elastic launchers: where a worker is started
    "_create_c10d_store",  # torch.distributed: with which a rank reaches rank 0's store
    "_get_default_store",  # torch.distributed: the job's store, of which the agreement makes a clone
    "_get_default_group",  # torch.distributed: the job's process group
    "_new_process_group_helper",  # torch.distributed: makes every process group
    "_module_state_mapping",  # torch.distributed: which modules are sharded, in place
    "_device_types",  # of it: the devices for which it has a backend
    "_get_backend",  # of it: that of a device, to abort it
    "_comm_hooks",  # torch: see reduction_order.py
    "_extra_state",  # torch: how it ends in a state dict
    "_orig",  # torch: how the names of pruned weights end
    "_mask",
    "_handle",  # torch's FSDP1: what it has made of the parameters of a module
    "_fqns",
    "_shapes",
    "_iterator",  # torch: the iterator that a DataLoader keeps for its persistent workers
    "_backward_hooks",
    "_modules",
    "_post_accumulate_grad_hooks",
    "_dtypes",  # the Flight Recorder's names
    "_all_gather_base",
    "_pydevd",  # names of files, by which debuggers and the standard library are known
    "_bootstrap",
    "_worker_loop",
}


def package_of(trainer: Any) -> str:
    return "pytorch_lightning" if type(trainer).__module__.startswith("pytorch_lightning") else "lightning.pytorch"


def async_checkpoint_io(package: str) -> Any:
    plugins = importlib.import_module(f"{package}.plugins.io")
    return plugins.AsyncCheckpointIO(plugins.TorchCheckpointIO())


def combined_iterator(package: str) -> Any:
    """What a fit iterates over. A fit makes it for itself and has none left at its end."""
    loader = importlib.import_module(f"{package}.utilities.combined_loader").CombinedLoader([DataLoader(range(4))])
    return iter(loader)._iterator


@pytest.fixture(scope="module", params=PACKAGES)
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """After a fit, when everything is there that is made on the way."""
    package = importlib.import_module(request.param)

    class Module(importlib.import_module(f"{request.param}.demos.boring_classes").BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)["loss"]
            self.log("loss", loss, on_epoch=True)
            return loss

    trainer = package.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path_factory.mktemp("fit"), limit_val_batches=1,
    )  # fmt: skip
    trainer.fit(Module())
    return trainer


@pytest.mark.parametrize("where", NAMES)
def test_every_name_exists(trainer: Any, where: str) -> None:
    find, names = NAMES[where]
    owner = find(trainer)
    missing = sorted(name for name in names if not hasattr(owner, name))
    assert not missing, f"{where} has no {', '.join(missing)} any more: see who uses it in _lightning/"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_combined_loader_is_that_of_the_trainers_package(package: str) -> None:
    trainer = importlib.import_module(package).Trainer(barebones=True)
    assert lightning_data.combined_loader_class(trainer).__module__ == f"{package}.utilities.combined_loader"


@pytest.mark.parametrize("package", PACKAGES)
def test_classes_are_recognised_by_names_that_exist(package: str) -> None:
    fabric = FABRIC[package]
    source = "".join(path.read_text() for path in HOME)
    for module, name in CLASSES:
        where = module.format(package=package, fabric=fabric)
        assert getattr(importlib.import_module(where), name).__module__ == where
        assert f'"{where}"' in source
    recognised = re.findall(r'"((?:lightning|pytorch_lightning|lightning_fabric)[\w.]*\.[\w.]+)"', source)
    known = {module.format(package=p, fabric=f) for module, _ in CLASSES for p, f in FABRIC.items()}
    assert set(recognised) <= known | set(PACKAGES)


def test_a_fetcher_that_the_user_iterates_starts_with_the_plain_one(trainer: Any) -> None:
    """``replay_fetch`` calls its base's ``__next__``."""
    fetchers = importlib.import_module(f"{package_of(trainer)}.loops.fetchers")
    assert "__next__" in vars(fetchers._DataLoaderIterDataFetcher.__mro__[1])


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Private attributes of anything but ``self``, ``cls`` and this package's own, and strings that name one."""
    tree = ast.parse(path.read_text())
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and of_self(node):
            own.add(node.attr)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = node.attr
            if of_self(node):
                continue
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        else:
            continue
        if re.fullmatch(r"_[A-Za-z]\w*", name) and name not in own:
            yield node.lineno, name


def test_the_table_has_every_name_that_is_used() -> None:
    checked = set().union(*(names for _, names in NAMES.values()))
    unchecked = [
        f"{path.name}:{line}: {name}" for path in HOME for line, name in private_names(path) if name not in checked
    ]
    assert not unchecked, "add these to NAMES"


def test_no_other_file_uses_a_private_name() -> None:
    used = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path not in HOME and path.name != "_nvrx.py"
        for line, name in private_names(path)
        if name not in NOT_LIGHTNING
    ]
    assert not used


def test_imports_of_private_modules() -> None:
    """Nor imports one, of Lightning's or NVRx's."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [f"{node.module}.{alias.name}" for alias in node.names]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for module in modules:
                foreign = module.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics")
                assert not (foreign and "._" in module), f"{path.name}: {module}"
                assert not module.startswith("nvidia_resiliency_ext") or path.name == "_nvrx.py", (
                    f"{path.name}: {module}"
                )


def test_the_checks_find_something(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        'class A:\n    def f(self, trainer):\n        self._x = trainer._y\n        getattr(trainer, "_z")\n'
    )
    assert list(private_names(bad)) == [(3, "_y"), (4, "_z")]
    assert "_checkpoint_connector" in {name for path in HOME for _, name in private_names(path)}


def test_all_patches_are_undone_where_the_script_has_removed_one() -> None:
    owner = SimpleNamespace(first=len, second=len)
    other = type("Owner", (), {"method": lambda self: 1})()
    patches = Patches()
    patches.set(owner, "first", abs)
    patches.set(other, "method", lambda: 2)
    del other.method
    patches.undo()
    assert owner.first is len
    assert other.method() == 1
