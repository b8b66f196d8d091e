"""The private names of transformers (5.0 to 5.23) that training uses or overrides, and the
arguments that it has renamed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, masking_utils
from transformers.utils import import_utils

# A PreTrainedModel, or its wrapper by PEFT or an engine. Its attributes (config, generate,
# merge_and_unload, ...) come from nn.Module.__getattr__, which a type checker reads as
# Tensor | Module.
Network = Any


class OpenTrainer(Trainer):
    """Trainer with public methods for its private steps; `library` is Trainer's own step."""

    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any

    def refuse_wrapper(self, network: Network) -> None:
        """Raise for a wrapper with which the loss would be wrong."""

    def gradient_norm(self, library: Callable[[], Any]) -> Any:
        return library()

    def clip_gradients(self, library: Callable[[], Any]) -> Any:
        return library()

    def is_best_metric(self, library: Callable[[], bool], metrics: dict[str, float]) -> bool:
        return library()

    def load_weights(self, library: Callable[[], None]) -> None:
        library()

    def prepare_training(
        self, library: Callable[[str | None], Any], resume_from_checkpoint: str | None
    ) -> tuple[torch.nn.Module, DataLoader]:
        return library(resume_from_checkpoint)

    def save_checkpoint(self, library: Callable[[], None]) -> None:
        library()

    def save_optimizer(self, library: Callable[[], None], output_dir: str) -> None:
        library()

    def _wrap_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Wrap the model; under DDP a gradient is a view of the bucket that is reduced, which saves
        a copy of the gradients."""
        wrapped = super()._wrap_model(model, *args, **kwargs)
        self.refuse_wrapper(wrapped)
        if self.accelerator.ddp_handler is not None:
            self.accelerator.ddp_handler.gradient_as_bucket_view = True
        return wrapped

    def _prepare_input(self, data: Any) -> Any:
        """Copy to a GPU without waiting: batches are in pinned memory, and the kernels that read
        them come later."""
        if isinstance(data, torch.Tensor) and self.args.device.type == "cuda":
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def _get_num_items_in_batch(
        self, batch_samples: list[Any], device: torch.device
    ) -> torch.Tensor | int | None:
        """The number of targets, copied to a GPU without waiting."""
        batches = [batch for batch in batch_samples if batch]
        if self.args.device.type != "cuda":
            return super()._get_num_items_in_batch(batches, device)
        averages = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        try:
            count = super()._get_num_items_in_batch(batches, torch.device("cpu"))
        finally:
            self.args.average_tokens_across_devices = averages
        if not isinstance(count, torch.Tensor):
            return count
        count = count.pin_memory().to(device, non_blocking=True)
        if averages and self.args.world_size > 1:
            count = self.accelerator.gather(count).sum()  # pyright: ignore
        return count

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        return self.gradient_norm(partial(super()._get_grad_norm, *args, **kwargs))

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return self.clip_gradients(partial(super()._clip_grad_norm, model))

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        library = partial(super()._determine_best_metric, metrics, trial)
        return self.is_best_metric(library, metrics)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.load_weights(partial(super()._load_from_checkpoint, resume_from_checkpoint, model))

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[torch.nn.Module, DataLoader]:
        library = partial(super()._prepare_for_training, max_steps, train_dataloader)
        return self.prepare_training(library, resume_from_checkpoint)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        self.save_checkpoint(partial(super()._save_checkpoint, model, trial))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        library = partial(super()._save_optimizer_and_scheduler, output_dir)
        self.save_optimizer(library, output_dir)


def load_weights(trainer: Trainer, folder: str) -> None:
    """Put a checkpoint's weights in place of the model's, as Trainer does."""
    Trainer._load_from_checkpoint(trainer, folder, trainer.model)


def by_installed_names(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of TrainingArguments: before 5.23 the name was gradient_checkpointing."""
    names = {field.name for field in fields(TrainingArguments)}
    return {
        name if name in names else name.replace("activation_", "gradient_", 1): value
        for name, value in arguments.items()
    }


def hold_to_one_gpu(args: TrainingArguments) -> None:
    """Keep transformers from running this process on all GPUs that it sees (nn.DataParallel)."""
    if args.n_gpu > 1:
        args._n_gpu = 1


def attention(network: Network) -> str:
    return network.config._attn_implementation


def set_attention(network: Network, name: str) -> None:
    """Set the attention of a finished network: while making a network, transformers would look for
    a card."""
    network.config._attn_implementation = name


def layer_classes(network: Network) -> tuple[str, ...]:
    """The classes of modules that are sharded as a unit."""
    return tuple(getattr(network, "_no_split_modules", None) or ())


def quantize_layers(network: Network, config: Any) -> None:
    """Replace the linear layers that from_pretrained() would replace."""
    from transformers.quantizers.auto import AutoHfQuantizer

    AutoHfQuantizer.from_config(config)._process_model_before_weight_loading(network, None)


@contextmanager
def without_zero_init() -> Iterator[None]:
    """Inside, transformers builds a full model under ZeRO-3, not shards: the random initial weights
    of a shard are not those of the same seed."""
    from transformers.integrations import deepspeed as integration

    reference = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = reference


@contextmanager
def known_padding(is_padded: bool) -> Iterator[None]:
    """Inside, transformers does not ask the device whether a mask hides padding."""
    names = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
    library = {name: getattr(masking_utils, name) for name in names}

    def decided(decide: Callable[..., bool]) -> Callable[..., bool]:
        """A mask that hides nothing is as none."""
        return lambda mask, *args: not (is_padded and mask is not None) and decide(None, *args)

    for name, decide in library.items():
        setattr(masking_utils, name, decided(decide))
    try:
        yield
    finally:
        for name, decide in library.items():
            setattr(masking_utils, name, decide)


# (owner, name, value) with which masks of fake tensors are treated as masks of real tensors. Of a
# fake tensor, transformers would keep a mask that masks nothing.
REAL_MASKS = (import_utils, "is_fake_tensor", lambda tensor: False)


def fakes_as_real(flash_attn_varlen: Any) -> list[tuple[Any, str, Any]]:
    """REAL_MASKS, and (owner, name, value) with which flash_attn's kernel is this function."""
    from transformers import modeling_flash_attention_utils as flash_utils

    functions = (None, flash_attn_varlen, None, None, None)
    return [
        REAL_MASKS,
        (flash_utils, "_lazy_imports", lambda *args, **kwargs: functions),
        (flash_utils, "_loaded_implementation", None),
    ]
