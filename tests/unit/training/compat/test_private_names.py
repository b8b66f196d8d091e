"""Each private name of a library that training/ uses: it exists in the installed version, with
these parameters. A failure says what of ours has to follow."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from training.compat import transformers_private

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[4]
COMPAT = ROOT / "training" / "compat"
TRAINER = "transformers.trainer:Trainer"
ZERO_12 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
LIGER = "liger_kernel.transformers.monkey_patch"
FLASH = "transformers.modeling_flash_attention_utils"

# who of ours needs it, the name, its first parameters (None: no function of Python's)
NAMES = [
    ("OpenTrainer", f"{TRAINER}._wrap_model", "self model"),
    ("OpenTrainer", f"{TRAINER}._prepare_input", "self data"),
    ("OpenTrainer", f"{TRAINER}._get_num_items_in_batch", "self batch_samples device"),
    ("OpenTrainer.gradient_norm", f"{TRAINER}._get_grad_norm", "self model"),
    ("OpenTrainer.clip_gradients", f"{TRAINER}._clip_grad_norm", "self model"),
    ("OpenTrainer.is_best_metric", f"{TRAINER}._determine_best_metric", "self metrics trial"),
    ("load_weights", f"{TRAINER}._load_from_checkpoint", "self resume_from_checkpoint model"),
    (
        "OpenTrainer.prepare_training",
        f"{TRAINER}._prepare_for_training",
        "self max_steps train_dataloader resume_from_checkpoint",
    ),
    ("OpenTrainer.save_checkpoint", f"{TRAINER}._save_checkpoint", "self model trial"),
    (
        "OpenTrainer.save_optimizer",
        f"{TRAINER}._save_optimizer_and_scheduler",
        "self output_dir",
    ),
    (
        "quantize_layers",
        "transformers.quantizers.base:HfQuantizer._process_model_before_weight_loading",
        "self model",
    ),
    (
        "each_packed",
        "transformers.core_model_loading:set_param_for_module",
        "model target_name param_value",
    ),
    ("each_packed", "transformers.core_model_loading:get_device", "device_map param_name"),
    ("each_packed", "transformers.core_model_loading:spawn_materialize", "thread_pool tensor"),
    (
        "each_packed",
        "transformers.modeling_utils:caching_allocator_warmup",
        "model expanded_device_map hf_quantizer",
    ),
    (
        "leave_casts_to_autocast",
        "peft.tuners.tuners_utils:BaseTunerLayer._cast_input_dtype",
        "self x dtype",
    ),
    (
        "known_padding",
        "transformers.masking_utils:_ignore_causal_mask_sdpa",
        "padding_mask q_length kv_length",
    ),
    (
        "known_padding",
        "transformers.masking_utils:_ignore_bidirectional_mask_sdpa",
        "padding_mask kv_length",
    ),
    ("fakes_as_real", "transformers.utils.import_utils:is_fake_tensor", "x"),
    ("fakes_as_real", f"{FLASH}:_lazy_imports", "implementation"),
    ("fakes_as_real", f"{FLASH}:_loaded_implementation", None),
    (
        "without_zero_init",
        "transformers.integrations.deepspeed:_hf_deepspeed_config_weak_ref",
        None,
    ),
    ("SAVE_ON_CPU", "transformers.modeling_utils:save_on_cpu", "pin_memory device_type"),
    ("layer_classes", "transformers:PreTrainedModel._no_split_modules", None),
    ("final_norm", "accelerate.utils.fsdp_utils:_find_final_norm", "model"),
    (
        "fp16_on_cpu",
        "accelerate.accelerator:get_mixed_precision_context_manager",
        "native_amp autocast_kwargs",
    ),
    ("gemm_4bit", "bitsandbytes.backends.default.ops:_gemm_4bit_default_impl", "A B shapeB absmax"),
    ("quantized", "bitsandbytes.nn:Params4bit._quantize", "self device"),
    ("watch_step", f"{ZERO_12}._update_scale", "self has_overflow"),
    ("watch_step", f"{ZERO_12}._optimizer_step", "self group_no"),
    ("watch_step", f"{ZERO_12}.scaled_global_norm", "self norm_type"),
    ("watch_step", f"{ZERO_3}._update_scale", "self has_overflow"),
    ("watch_step", f"{ZERO_3}._optimizer_step", "self sub_group_id"),
    ("watch_step", f"{ZERO_3}._get_norm_groups", None),
    (
        "saving_with",
        "deepspeed.runtime.engine:DeepSpeedEngine._copy_recovery_script",
        "self save_path",
    ),
    (
        "pin_nothing",
        "deepspeed.accelerator.cuda_accelerator:CUDA_Accelerator.pin_memory",
        "self tensor make_copy match_shape",
    ),
    ("leave_out_compiled_all_reduce", "deepspeed.ops:__compatible_ops__", None),
    ("end_what_cannot_send", "multiprocessing.queues:Queue._on_queue_feeder_error", "e obj"),
    ("shorten_socket_folder", "multiprocessing.process:_current_process._config", None),
    ("remove_socket_folder", "multiprocessing.process:_current_process._config", None),
    ("largest", "torch:_foreach_norm", None),
    ("safe_softmax", "torch:_safe_softmax", None),
    ("default_store", "torch.distributed.distributed_c10d:_get_default_store", ""),
    (
        "read_sharded",
        "torch.distributed.checkpoint.format_utils:_load_state_dict",
        "state_dict storage_reader",
    ),
    (
        "read_sharded",
        "torch.distributed.checkpoint.format_utils:_EmptyStateDictLoadPlanner",
        None,
    ),
    ("rebuilds_tensor", "torch._utils:_rebuild_tensor_v2", None),
    ("rebuilds_tensor", "torch._tensor:_rebuild_from_type_v2", None),
    ("storage_key", "torch:UntypedStorage._cdata", None),
    ("is_view", "torch:Tensor._is_view", None),
    ("is_view_of_weight", "torch:Tensor._base", None),
    ("grouped_products", "torch:_grouped_mm", None),
    ("schema", "torch:ops.aten.add.Tensor._schema", None),
    ("packet", "torch:ops.aten.add.Tensor._overloadpacket", None),
    ("next_node_number", "torch.autograd:_get_sequence_nr", None),
    ("current_node_number", "torch:_C._current_autograd_node", None),
    ("destroy", "torch.library:Library._destroy", "self"),
    ("has_kernel", "torch:_C._dispatch_has_kernel_for_dispatch_key", None),
    ("operator_names", "torch:_C._dispatch_get_all_op_names", None),
    ("without_autocast", "torch:_C._ExcludeDispatchKeyGuard", None),
    ("without_autocast", "torch:_C.DispatchKey.AutocastCPU", None),
    ("foreach_on_cpu", "torch.optim.optimizer:_foreach_supported_types", None),
    (
        "foreach_on_cpu",
        "torch.optim.optimizer:_get_foreach_kernels_supported_devices",
        "",
    ),
    ("foreach_on_cpu", "torch.utils._foreach_utils:_foreach_supported_types", None),
    (
        "foreach_on_cpu",
        "torch.utils._foreach_utils:_get_foreach_kernels_supported_devices",
        "",
    ),
    ("cuda_semantics", "torch._subclasses.fake_impls:op_implementations_dict", None),
    ("cuda_semantics", "torch._subclasses.fake_tensor:FakeTensorMode.cache_clear", ""),
    (
        "short_cache",
        "torch._subclasses.fake_tensor:FakeTensorMode._cache_key",
        "self state func args kwargs",
    ),
    (
        "short_cache",
        "torch._subclasses.fake_tensor:FakeTensorMode._get_output_tensor_from_cache_entry",
        "self state entry key func args",
    ),
    ("short_cache", "torch._subclasses.fake_tensor:_BypassDispatchCache", None),
    ("short_cache", "torch:_C._DisableTorchDispatch", None),
    ("short_cache", "torch:_C._set_throw_on_mutable_data_ptr", None),
    ("patch", f"{LIGER}:_apply_liger_kernel_to_instance", "model"),
    ("switches", f"{LIGER}:MODEL_TYPE_TO_APPLY_LIGER_FN", None),
    (
        "children/on_loopback.py",
        "torch.distributed.elastic.rendezvous.static_tcp_rendezvous:TCPStore",
        None,
    ),
]

# attributes that a class of DeepSpeed sets for itself
SET_BY = [
    ("master_slices", ZERO_12, "single_partition_of_fp32_groups"),
    ("master_slices", ZERO_3, "fp32_partitioned_groups_flat"),
    ("gradient_slices", ZERO_3, "grad_partitions_flat_buffer"),
    ("saving_with", "deepspeed.runtime.engine:DeepSpeedEngine", "checkpoint_engine"),
    ("slice_mapping", "deepspeed.utils:mixed_precision_linkage", "_hp_mapping"),
    ("local_part", "deepspeed.runtime.zero:partition_parameters", "ds_tensor"),
    ("whole_shape", "deepspeed.runtime.zero:partition_parameters", "ds_shape"),
    ("hold_to_one_gpu", "transformers:TrainingArguments", "_n_gpu"),
    ("attention", "transformers:PreTrainedConfig", "_attn_implementation"),
]


def member(name: str) -> Any:
    """The object of `module:attribute.attribute`."""
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for attribute in path.split("."):
        found = getattr(found, attribute)
    return found


@pytest.mark.parametrize(("needed_by", "name", "parameters"), NAMES)
def test_the_installed_version_has_the_name_with_these_parameters(needed_by, name, parameters):
    message = f"training's {needed_by} uses {name}, which has changed"
    try:
        found = member(name)
    except (ImportError, AttributeError) as error:
        raise AssertionError(message) from error
    if parameters is not None:
        expected = parameters.split()
        assert list(inspect.signature(found).parameters)[: len(expected)] == expected, message


@pytest.mark.parametrize(("needed_by", "owner", "attribute"), SET_BY)
def test_the_installed_version_still_sets_the_attribute(needed_by, owner, attribute):
    try:
        found = member(owner)
    except AttributeError:
        found = importlib.import_module(owner.replace(":", "."))
    message = f"training's {needed_by} reads {attribute}, which {owner} no longer sets"
    assert attribute in inspect.getsource(found), message


def test_a_schedules_state_has_the_lists_that_are_carried_over():
    import torch

    from training.compat import torch_private

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert set(torch_private.SCHEDULE_LISTS) <= set(schedule.state_dict())


def test_activation_checkpointing_is_asked_for_under_the_name_that_transformers_knows(tmp_path):
    from transformers import TrainingArguments

    every = {"every_n_layers": 2}
    arguments = transformers_private.by_installed_names(
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": every}
    )
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **arguments)
    assert [getattr(args, name) for name in arguments] == [True, every]


def test_an_older_transformers_is_asked_by_its_own_name(monkeypatch):
    @dataclass
    class Older:
        gradient_checkpointing: bool = False
        seed: int = 0

    monkeypatch.setattr(transformers_private, "TrainingArguments", Older)
    arguments = {"activation_checkpointing": True, "seed": 1}
    assert transformers_private.by_installed_names(arguments) == {
        "gradient_checkpointing": True,
        "seed": 1,
    }


def private_uses(source: Path) -> list[str]:
    """file:line of each private attribute that is not the object's own."""
    private, uses = re.compile("_[^_]"), []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            is_private = private.match(node.attr) is not None
            # operators of ATen, os._exit and namedtuples' methods are documented
            is_documented = owner in ("self", "aten", "os") or node.attr in ("_fields", "_replace")
            if is_private and not is_documented:
                uses.append(f"{source.name}:{node.lineno} {node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            uses += [f"{source.name}:{node.lineno} {part}" for part in parts if private.match(part)]
    return uses


def test_private_names_of_libraries_stand_in_the_compat_folder_alone():
    outside = [path for path in (ROOT / "training").rglob("*.py") if path.parent != COMPAT]
    assert len(outside) > 40
    assert {use for path in outside for use in private_uses(path)} == set()
    assert len([use for path in COMPAT.glob("*.py") for use in private_uses(path)]) > 20
