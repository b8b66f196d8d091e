"""Each field of TrainingArguments that a recipe may name has an effect on what training does.

A test shows the effect of a field on the loop's own objects. The last test runs each of them again
with the field left out, where it has to fail."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging as transformers_logging

from launch.plan import kernels
from launch.recipe import training_arguments
from launch.run_folder.layout import RunDir
from launch.schema.levers import requested
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.recipe_keys import HONOURED
from launch.schema.training_section import TrainingSection
from tests import builders
from tests.real_steps import Loader
from training.data.batches import Collator
from training.data.sample_order import SampleOrder
from training.engines import setup
from training.loop import arguments, trackers
from training.loop.callbacks import StepMeter
from training.loop.trainer import LowMemTrainer

TRACKIO = """
__version__, config, given = "0.22", {}, {}
class context_vars:
    class current_space_id:
        get = staticmethod(lambda: given.get("space_id"))
def init(**words): given.update(words)
def freeze(**words): given.update(words)
def log(figures): pass
def finish(): pass
"""


def honours(**values: Any) -> Callable[[Any], Any]:
    """Mark a test as that of these fields, which it gets one at a time: (field, value, the training
    section's keys with the field)."""

    def marked(test: Any) -> Any:
        test.values = values
        cases = [(field, value, {field: value}) for field, value in values.items()]
        return pytest.mark.parametrize(("field", "value", "given"), cases, ids=list(values))(test)

    return marked


@pytest.fixture(autouse=True)
def settings_of_the_process() -> Iterator[None]:
    """Give back what a field sets for the whole process."""
    before, verbosity = dict(os.environ), transformers_logging.get_verbosity()
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    transformers_logging.set_verbosity(verbosity)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


class Observed(LowMemTrainer):
    """A trainer of four batches, which are evaluated too."""

    def get_train_dataloader(self) -> Any:
        ids = torch.arange(5, 13)[None]
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        return Loader([dict(batch) for _ in range(4)])

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.get_train_dataloader()


def planned(**given: Any) -> tuple[Recipe, Plan]:
    """A recipe with these keys in its training section, and the plan of one without them."""
    plan = builders.plan()
    recipe = builders.recipe_of(training={"save_steps": 1000, "num_train_epochs": 1, **given})
    levers = replace(requested(recipe), use_liger_kernel="liger_kernel_config" in given)
    strategy = replace(
        plan.strategy,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        levers=levers,
    )
    return recipe, replace(plan, strategy=strategy)


def arguments_of(**given: Any) -> Any:
    made = arguments.make_arguments(*planned(**given), 4, True, {"ddp_backend": None})
    made.report_to, made.save_strategy, made.output_dir = [], "no", os.curdir
    return made


def trainer(made: Any, kind: type[LowMemTrainer] = Observed, **more: Any) -> LowMemTrainer:
    config = AutoConfig.for_model(
        "gpt2", vocab_size=16, n_embd=8, n_layer=1, n_head=1, n_positions=8
    )
    found = kind(
        order=SampleOrder(4, 1, 1, 1, 0, 0),
        meter=StepMeter(),
        keep_checkpoints=2,
        facts={},
        model=AutoModelForCausalLM.from_config(config),
        args=made,
        train_dataset=[0],
        eval_dataset=[0],
        **more,
    )
    found.remove_callback(PrinterCallback)
    return found


@honours(adam_beta1=0.5, adam_beta2=0.6, adam_epsilon=1e-3, optim_args="momentum=0.7")
def test_the_optimizer_takes_its_numbers(field: str, value: Any, given: dict[str, Any]) -> None:
    optim = "sgd" if field == "optim_args" else "adamw_torch"
    group = trainer(arguments_of(optim=optim, **given)).create_optimizer().param_groups[0]
    betas = group.get("betas", (None, None))
    found = {
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        "adam_epsilon": group.get("eps"),
        "optim_args": f"momentum={group.get('momentum')}",
    }
    assert found[field] == value


@honours(lr_scheduler_kwargs={"lr_end": 1e-6})
def test_the_schedule_takes_its_numbers(field: str, value: Any, given: dict[str, Any]) -> None:
    found = trainer(arguments_of(lr_scheduler_type="polynomial", learning_rate=1e-3, **given))
    found.create_optimizer_and_scheduler(4)
    for _ in range(5):
        found.optimizer.step()
        found.lr_scheduler.step()
    assert found.lr_scheduler.get_last_lr()[0] == value["lr_end"]


@honours(tf32=True, liger_kernel_config={"rope": False})
def test_the_kernels_are_those_asked_for(field: str, value: Any, given: dict[str, Any]) -> None:
    if field == "liger_kernel_config":
        config = arguments_of(**given).liger_kernel_config or {}
        assert {name: config.get(name) for name in value} == value
        return
    assert kernels.tf32(builders.recipe_of(training=given), [builders.gpu()]) is value


@honours(torch_compile=True, torch_compile_backend="eager", torch_compile_mode="max-autotune")
def test_the_layers_are_compiled_as_asked_for(
    field: str, value: Any, given: dict[str, Any]
) -> None:
    options: dict[str, Any] = {}
    _, chosen = planned(**given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT2Block, "compile", lambda self, **words: options.update(words))
        made = trainer(arguments_of(**given), levers=chosen.strategy.levers)
    assert made.accelerator.state.dynamo_plugin.backend.value == "NO", "or all of it once more"
    found = {
        "torch_compile": options.get("dynamic"),
        "torch_compile_backend": options.get("backend"),
        "torch_compile_mode": options.get("mode"),
    }
    assert found[field] == value


class Noise(TrainerCallback):
    """The noise that is added to the embeddings at a step."""

    alpha: float | None = None

    def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.alpha = getattr(model.get_input_embeddings(), "neftune_noise_alpha", None)


@honours(neftune_noise_alpha=5.0, torch_empty_cache_steps=2)
def test_a_step_does_what_is_asked_for(field: str, value: Any, given: dict[str, Any]) -> None:
    noise, emptied = Noise(), []

    def called(frame: Any, event: str, argument: Any) -> None:
        names = frame.f_code.co_name, frame.f_back and frame.f_back.f_code.co_name
        if event == "call" and names == ("clear_device_cache", "training_step"):
            emptied.append(event)

    found = trainer(arguments_of(**given), callbacks=[noise])
    sys.setprofile(called)
    try:
        found.train()
    finally:
        sys.setprofile(None)
    steps = found.state.global_step // len(emptied) if emptied else None
    assert {"neftune_noise_alpha": noise.alpha, "torch_empty_cache_steps": steps}[field] == value


@honours(eval_delay=3, eval_on_start=True, logging_first_step=True, logging_strategy="epoch")
def test_evaluations_and_logs_come_when_asked_for(
    field: str, value: Any, given: dict[str, Any]
) -> None:
    each = {"eval_steps": 1, "logging_steps": 3 if field == "logging_first_step" else 1}
    found = trainer(arguments_of(**each, **given))
    found.train()
    history = found.state.log_history
    evaluated = [each["step"] for each in history if "eval_loss" in each]
    logged = [each["step"] for each in history if "loss" in each]
    expected = {
        "eval_delay": (evaluated, [3, 4]),
        "eval_on_start": (evaluated, [0, 1, 2, 3, 4]),
        "logging_first_step": (logged, [1, 3]),
        "logging_strategy": (logged, [4]),
    }
    assert expected[field][0] == expected[field][1]


@honours(
    dataloader_persistent_workers=False, dataloader_pin_memory=False, dataloader_prefetch_factor=4
)
def test_the_loader_is_the_one_asked_for(field: str, value: Any, given: dict[str, Any]) -> None:
    recipe, plan = planned(**given)
    strategy = replace(plan.strategy, device="cuda", dataloader_num_workers=1)
    made = arguments.make_arguments(
        recipe, replace(plan, strategy=strategy), 4, True, {"ddp_backend": None}
    )
    made.report_to, made.output_dir = [], os.curdir
    found = trainer(made, LowMemTrainer, data_collator=Collator(0))
    found.args = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        **vars(made), device=torch.device("cuda")
    )
    loader = found.get_train_dataloader()
    assert getattr(loader, field.removeprefix("dataloader_")) == value


@honours(
    ddp_broadcast_buffers=False,
    ddp_bucket_cap_mb=7,
    ddp_find_unused_parameters=True,
    ddp_static_graph=True,
)
def test_ddp_takes_its_keywords(field: str, value: Any, given: dict[str, Any]) -> None:
    handler = trainer(arguments_of(**given)).accelerator.ddp_handler
    assert getattr(handler, field.removeprefix("ddp_")) == value


@honours(ddp_timeout=77)
def test_the_ranks_wait_for_each_other_as_long_as_asked_for(
    field: str, value: Any, given: dict[str, Any]
) -> None:
    recipe, plan = planned(**given)
    strategy = replace(plan.strategy, mode="multi_cpu", backend="gloo")
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    PartialState._reset_state()
    os.environ.update(setup.SINGLE_RANK | store)
    try:
        setup.prepare(strategy, None, arguments.timeout_s(recipe.training))
        group = torch.distributed.distributed_c10d._get_default_group()
        wait = group._get_backend(torch.device("cpu")).options._timeout
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        PartialState._reset_state()
    assert wait.total_seconds() == value


@honours(full_determinism=True)
def test_the_kernels_are_deterministic(field: str, value: Any, given: dict[str, Any]) -> None:
    trainer(arguments_of(**given))
    assert torch.are_deterministic_algorithms_enabled() is value


@honours(log_level="error", log_level_replica="error")
def test_transformers_logs_at_its_level(field: str, value: Any, given: dict[str, Any]) -> None:
    made, rank = arguments_of(**given), int(field == "log_level_replica")
    ranks = {"process_index": rank, "local_process_index": rank}
    made.distributed_state = SimpleNamespace(**{**vars(made.distributed_state), **ranks})
    trainer(made)
    assert transformers_logging.get_verbosity() == transformers_logging.log_levels[value]


@honours(
    project="ours",
    run_name="third",
    trackio_bucket_id="me/bucket",
    trackio_space_id="me/space",
    trackio_static_space_id="me/still",
)
def test_a_tracker_gets_its_names(field: str, value: Any, given: dict[str, Any]) -> None:
    if field == "trackio_static_space_id":
        given = {"trackio_space_id": "me/space", **given}
    made, network = arguments_of(**given), torch.nn.Linear(1, 1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "trackio.py").write_text(TRACKIO)
        sys.path.insert(0, folder)
        try:
            [tracker] = trackers.callbacks(("trackio",), RunDir(Path(folder)), Path(folder), made)
            zero = SimpleNamespace(is_world_process_zero=True)
            tracker.on_train_begin(made, zero, None, model=network)  # pyright: ignore
            tracker.on_train_end(made, zero, None, model=network)  # pyright: ignore
            found = sys.modules.pop("trackio").given
        finally:
            sys.path.remove(folder)
    names = {"run_name": "name", "trackio_static_space_id": "new_space_id"}
    assert found.get(names.get(field, field.removeprefix("trackio_"))) == value


def test_an_evaluation_at_the_start_needs_held_out_rows():
    recipe, plan = planned(eval_on_start=True)
    for evaluates in (True, False):
        made = arguments.make_arguments(recipe, plan, 4, evaluates, {"ddp_backend": None})
        assert made.eval_on_start is evaluates


def test_every_installed_field_is_known_to_one_table():
    typed = set(TrainingSection.model_fields)
    assert not set(HONOURED) & (set(training_arguments.OWNED) | typed)
    unknown = set(training_arguments.installed()) - typed - set(HONOURED)
    assert [
        field
        for field in sorted(unknown)
        if training_arguments.instead(field) == training_arguments.UNREAD
    ] == []


@pytest.mark.parametrize("field", HONOURED)
def test_the_test_of_a_field_sets_it_and_fails_without_it(field: str) -> None:
    test = globals()[HONOURED[field]]
    with pytest.raises(AssertionError):
        test(field, test.values[field], {})
